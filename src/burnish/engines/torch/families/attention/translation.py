"""Attention and its gradient, as one call each."""

from __future__ import annotations

from typing import Any

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.families.attention import cuda, dispatch
from burnish.engines.torch.translate.rules import Call, translates

HEADS = ("query", "key", "value")
FUSED_ATTENTION = EngineOperator("FusedAttention", (*HEADS, "mask"), ("result", "logarithms"))
FUSED_ATTENTION_GRAD = EngineOperator(
    "FusedAttentionGrad", ("flow", *HEADS, "result", "logarithms", "mask"), ("dquery", "dkey", "dvalue")
)
CUDA_ATTENTION = EngineOperator("CudaAttention", (*HEADS, "mask"), ("result", "logarithms", "seed", "offset"))
CUDA_ATTENTION_GRAD = EngineOperator(
    "CudaAttentionGrad", ("flow", *HEADS, "result", "logarithms", "seed", "offset", "mask"), ("dquery", "dkey", "dvalue")
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


@translates(CUDA_ATTENTION)
def cuda_attention(op: Call) -> Any:
    """(query, transposed key, value, mask or nothing) -> the result, and what its gradient takes."""
    heads = op.tensor(0), op.tensor(1).transpose(2, 3), op.tensor(2)
    results = cuda.attention(*heads, op.optional(3), *_settings(op))
    return tuple(results[place] for place in range(len(CUDA_ATTENTION.outputs)))


@translates(CUDA_ATTENTION_GRAD)
def cuda_attention_gradient(op: Call) -> Any:
    """(flow, query, transposed key, value, what attention returned, mask or nothing) -> the gradients of the three heads."""
    heads = op.tensor(1), op.tensor(2).transpose(2, 3), op.tensor(3)
    kept = op.tensor(4), op.tensor(5), op.tensor(6), op.tensor(7)
    results = cuda.attention_gradient(op.tensor(0), *heads, *kept, op.optional(8), *_settings(op))
    return results[0], results[1].transpose(2, 3), results[2]


def _settings(op: Call) -> tuple[float, bool, bool]:
    return op.attribute("scale"), bool(op.attribute("zeros")), bool(op.attribute("causal"))
