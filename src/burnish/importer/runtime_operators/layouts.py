"""Layouts of images: channels last, and those in which ONNX Runtime saves a model that it laid out for the processor at hand."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Tensor, describe_node
from burnish.operators import Operation
from burnish.operators.positions import known_rank

_DOMAINS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})


def laid_out_for_one_processor(node: ir.Node) -> str | None:
    """Return, in words and with what to do, that a node is of such an operator; None where it is not."""
    if node.domain not in _DOMAINS:
        return None
    return (
        f"{describe_node(node)} was saved by ONNX Runtime in the layout of one processor, which no other runtime reads: give the "
        "file that was optimized, or save it with graph_optimization_level = ORT_ENABLE_EXTENDED"
    )


def channels_first(op: Operation, x: Tensor) -> Tensor:
    """``[batch, ..., channels]`` to ``[batch, channels, ...]``."""
    rank = known_rank(op, x)
    return op.builder.op("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)])


def channels_last(op: Operation, x: Tensor) -> Tensor:
    """``[batch, channels, ...]`` to ``[batch, ..., channels]``."""
    return op.builder.op("Transpose", x, perm=[0, *range(2, known_rank(op, x)), 1])
