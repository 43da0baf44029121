"""Where the standard's inference, when it propagates the values of shapes, would not end.

It propagates a vector of integers element by element, at half a microsecond and forty bytes each: a model of a kilobyte with a
Range to 2**40 takes a week, or all memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx

LONGEST = 1 << 22
"""Elements of a vector that are propagated: two seconds."""


def holds_large_integers(graph: onnx.GraphProto) -> bool:
    """Whether an extent or integer constant of a graph, or of a body in it, is above ``LONGEST``: a vector may be as long."""
    for value in graph.input:
        if any(dimension.dim_value > LONGEST for dimension in value.type.tensor_type.shape.dim):
            return True
    if any(_is_large(tensor) for tensor in graph.initializer):
        return True
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.i > LONGEST or any(number > LONGEST for number in attribute.ints) or _is_large(attribute.t):
                return True
    return any(holds_large_integers(body) for body in _bodies(graph))


def has_long_vectors(graph: onnx.GraphProto) -> bool:
    """Whether a value of a graph, or of a body in it, is known to be a vector of more than ``LONGEST`` elements."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1 and dims[0].dim_value > LONGEST:
            return True
    return any(has_long_vectors(body) for body in _bodies(graph))


def _bodies(graph: onnx.GraphProto) -> Iterator[Any]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def _is_large(tensor: onnx.TensorProto) -> bool:
    if any(extent > LONGEST for extent in tensor.dims):
        return True
    is_integer = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if not is_integer or tensor.data_location == onnx.TensorProto.EXTERNAL:  # inference does not read what lies elsewhere
        return False
    array: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return array.size > 0 and int(array.max()) > LONGEST
