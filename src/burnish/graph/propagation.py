"""Where the standard's inference, when it propagates the values of shapes, would not end.

It propagates a vector of integers element by element, at half a microsecond and forty bytes each: a model of a kilobyte with a
Range to 2**40 takes a week, or all memory.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.attributes import attribute_value
from burnish.graph.describe import describe_node
from burnish.graph.protos import graphs_within

LONGEST = 1 << 22
"""Elements of a vector that are propagated: two seconds."""
MOST_PARTS = 256
"""Parts that exporters join a vector of, and axes of a tensor, are fewer."""
ENDS = frozenset({"Conv", "Gemm", "MatMul", "NonZero", "Shape", "Size"})
"""Operators whose result is no vector of what they read; so are reductions."""
SHAPED = {"ConstantOfShape": 0, "Reshape": 1, "Expand": 1}
"""Operators whose operand, of this index, has an element for each axis of the result."""


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


def joins_many_copies(graph: ir.Graph) -> bool:
    """Whether a Concat of a graph, or of a body in it, may join a vector to itself over and over: thirty make a billion elements.

    Raises:
        ModelError: such a vector is the shape of a tensor, which would have as many axes.
    """
    copies: dict[ir.Value, int] = {}
    joins_many = False
    for node in graph.all_nodes():
        if node.op_type in ENDS or node.op_type.startswith(("Reduce", "Arg")):
            continue
        parts = [1 if value is None else copies.get(value, 1) for value in node.inputs]
        place = SHAPED.get(node.op_type)
        if place is not None and place < len(parts) and parts[place] > MOST_PARTS:
            raise ModelError(
                f"{describe_node(node)} is given a shape of more than {MOST_PARTS} axes, which no runtime has: export the model "
                "again"
            )
        joins = node.op_type == "Concat" and attribute_value(node, "axis", 0) in (0, -1)
        number = sum(parts) if joins else max(parts, default=1)
        joins_many |= number > MOST_PARTS
        if number > 1:
            copies.update(dict.fromkeys(node.outputs, number))
    return joins_many


def has_long_vectors(proto: onnx.GraphProto, together: bool = False) -> bool:
    """Whether a value of a graph, or of a body in it, is known to be a vector of more than ``LONGEST`` elements; or, together,
    whether all that are computed have more."""
    graphs = list(graphs_within(proto))
    values = [value for graph in graphs for value in (*graph.value_info, *graph.output)]
    lengths = [dims[0].dim_value for value in values if len(dims := value.type.tensor_type.shape.dim) == 1]
    given = [dims[0].dim_value for graph in graphs for value in graph.input if len(dims := value.type.tensor_type.shape.dim) == 1]
    return max([*lengths, *given], default=0) > LONGEST or (together and sum(lengths) > LONGEST)


def _is_large(tensor: onnx.TensorProto) -> bool:
    if any(extent > LONGEST for extent in tensor.dims):
        return True
    is_integer = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if not is_integer or tensor.data_location == onnx.TensorProto.EXTERNAL:  # inference does not read what lies elsewhere
        return False
    array: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return array.size > 0 and int(array.max()) > LONGEST
