"""Weights that are integers: a quantized model has them, and no gradient moves them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from burnish.graph.describe import describe_node

NARROW_INTEGERS = frozenset(dtype for dtype in ir.DataType if dtype.name in ("INT2", "INT4", "INT8", "UINT2", "UINT4", "UINT8"))
"""What weights are quantized to; indices and shapes are wider."""


def quantization_of(node: ir.Node) -> str | None:
    """Return, in words and with what to do, that a node computes with weights that are integers; None where it does not.

    Weights are initializers of narrow integers with two dimensions or more.
    """
    for value in _integer_weights(node):
        assert value.dtype is not None
        assert value.shape is not None
        tensor = f"'{value.name}', {value.dtype.name.lower()} of shape {list(value.shape.numpy())}"
        return (
            f"the weights of {describe_node(node)} are integers ({tensor}), which no gradient moves: the model is "
            "quantized. Train the model in float32 that it was quantized from, and quantize the result"
        )
    return None


def integer_weights(graph: ir.Graph) -> dict[str, str]:
    """Return the weights of a graph that are integers: initializer name -> why they do not train, as a clause."""
    names = [value.name or "" for node in graph.all_nodes() for value in _integer_weights(node)]
    why = "integers, as the model is quantized; what trains all weights is the model in float32 that it was quantized from"
    return dict.fromkeys(names, why)


def _integer_weights(node: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.dtype not in NARROW_INTEGERS:
            continue
        if value.shape is not None and len(value.shape) > 1:
            yield value
