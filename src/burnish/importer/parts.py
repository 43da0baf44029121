"""Estimate the memory for the parts of a model before it is taken: a node of two bytes takes thousands."""

from __future__ import annotations

from typing import Any

import onnx

from burnish.errors import ModelError
from burnish.graph.protos import graphs_within
from burnish.untrusted import allowed_memory, memory_excess

# Bytes for each part, measured with parts that hold almost nothing.
NODE, RESULT, ATTRIBUTE, TENSOR, OTHER = 6 << 10, 3 << 10, 1 << 10, 8 << 10, 400
LONGEST_NAME = 1000
"""The most letters of a dimension's name. Every value with the dimension gets a copy."""


def check_parts(proto: onnx.ModelProto, name: str, size: int | None) -> None:
    """Refuse a model with too many parts for its memory, and dimensions with names that are too long.

    Args:
        proto: the model.
        name: the file or object, for messages.
        size: bytes of its file; None if the model came as an object.

    Raises:
        ModelError: with both numbers of bytes, or with the name of the value that has such a dimension.
    """
    needed = OTHER * (len(proto.metadata_props) + len(proto.functions) + len(proto.training_info))
    trained = [graph for info in proto.training_info for graph in (info.initialization, info.algorithm)]
    for body in graphs_within(proto.graph, *proto.functions, *trained):
        needed += _memory(body)
    if needed > allowed_memory(0):
        excess = memory_excess(needed, proto.ByteSize() if size is None else size)
        if excess is not None:
            raise ModelError(f"{name}: the model has too many nodes, tensors and other parts: {excess}")
    for graph in graphs_within(proto.graph, *trained):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dimension in value.type.tensor_type.shape.dim:
                if len(dimension.dim_param) > LONGEST_NAME:
                    raise ModelError(
                        f"{name}: a dimension of '{value.name}' has a name of {len(dimension.dim_param):,} letters, and "
                        f"{LONGEST_NAME:,} are the most: export the model with a shorter one"
                    )


def _memory(body: Any) -> int:
    """Return bytes for the parts of a graph or function; graphs inside its nodes are not counted."""
    needed = NODE * len(body.node)
    for node in body.node:
        needed += RESULT * len(node.output) + ATTRIBUTE * len(node.attribute) + OTHER * len(node.input)
        needed += OTHER * len(node.metadata_props)
        for attribute in node.attribute:
            needed += TENSOR * len(attribute.tensors) + OTHER * (len(attribute.strings) + len(attribute.type_protos))
    if isinstance(body, onnx.GraphProto):
        needed += TENSOR * (len(body.initializer) + len(body.sparse_initializer))
        needed += RESULT * (len(body.input) + len(body.output) + len(body.value_info))
        needed += OTHER * len(body.quantization_annotation)
    else:
        needed += OTHER * (len(body.input) + len(body.output) + len(body.value_info))
    return needed + OTHER * len(body.metadata_props)
