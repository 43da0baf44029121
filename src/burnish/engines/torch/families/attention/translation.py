"""Attention and its gradient, as one call each."""

from __future__ import annotations

from typing import Any

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.families.attention import dispatch
from burnish.engines.torch.translate.rules import Call, translates

FUSED_ATTENTION = EngineOperator("FusedAttention", ("query", "key", "value", "mask"), ("result", "logarithms"))
FUSED_ATTENTION_GRAD = EngineOperator(
    "FusedAttentionGrad", ("flow", "query", "key", "value", "result", "logarithms", "mask"), ("dquery", "dkey", "dvalue")
)


@translates(FUSED_ATTENTION)
def fused_attention(op: Call) -> Any:
    """(query, transposed key, value, mask or nothing) -> the result and the logarithms of the sums of exponentials."""
    dispatch.expect(op.dtype(0))
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    results = dispatch.attention(op.tensor(0), op.tensor(1).transpose(2, 3), op.tensor(2), op.optional(3), *settings)
    return results[0], results[1]


@translates(FUSED_ATTENTION_GRAD)
def fused_attention_gradient(op: Call) -> Any:
    """(flow, query, transposed key, value, result, logarithms, mask or nothing) -> the gradients of the three heads."""
    heads = op.tensor(1), op.tensor(2).transpose(2, 3), op.tensor(3)
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    results = dispatch.attention_gradient(op.tensor(0), *heads, op.tensor(4), op.tensor(5), op.optional(6), *settings)
    return results[0], results[1].transpose(2, 3), results[2]
