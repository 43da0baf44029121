"""Where the standard's inference, when it propagates the values of shapes, would not end.

It propagates a vector of integers element by element, at half a microsecond and forty bytes each: a model of a kilobyte with a
Range to 2**40 takes a week, or all memory.
"""

from __future__ import annotations

import numpy as np
import onnx

from burnish.graph.protos import graphs_within

LONGEST = 1 << 22
"""Elements of a vector that are propagated: two seconds."""


def holds_large_integers(proto: onnx.GraphProto) -> bool:
    """Whether an extent or integer constant of a graph, or of a body in it, is above ``LONGEST``: a vector may be as long."""
    graphs = list(graphs_within(proto))
    extents = (dimension.dim_value for graph in graphs for value in graph.input for dimension in value.type.tensor_type.shape.dim)
    attributes = (attribute for graph in graphs for node in graph.node for attribute in node.attribute)
    return (
        any(extent > LONGEST for extent in extents)
        or any(_is_large(tensor) for graph in graphs for tensor in graph.initializer)
        or any(
            attribute.i > LONGEST or any(number > LONGEST for number in attribute.ints) or _is_large(attribute.t)
            for attribute in attributes
        )
    )


def has_long_vectors(proto: onnx.GraphProto) -> bool:
    """Whether a value of a graph, or of a body in it, is known to be a vector of more than ``LONGEST`` elements."""
    values = (value for graph in graphs_within(proto) for value in (*graph.input, *graph.value_info, *graph.output))
    shapes = (value.type.tensor_type.shape.dim for value in values)
    return any(len(dims) == 1 and dims[0].dim_value > LONGEST for dims in shapes)


def _is_large(tensor: onnx.TensorProto) -> bool:
    if any(extent > LONGEST for extent in tensor.dims):
        return True
    is_integer = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if not is_integer or tensor.data_location == onnx.TensorProto.EXTERNAL:  # inference does not read what lies elsewhere
        return False
    array: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return array.size > 0 and int(array.max()) > LONGEST
