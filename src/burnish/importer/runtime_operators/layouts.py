"""Operators in which ONNX Runtime saves a model that it laid out for the processor at hand."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import describe_node

_DOMAINS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})


def laid_out_for_one_processor(node: ir.Node) -> str | None:
    """Return, in words and with what to do, that a node is of such an operator; None where it is not."""
    if node.domain not in _DOMAINS:
        return None
    return (
        f"{describe_node(node)} was saved by ONNX Runtime in the layout of one processor, which no other runtime reads: give the "
        "file that was optimized, or save it with graph_optimization_level = ORT_ENABLE_EXTENDED"
    )
