"""Scaled dot-product attention without a matrix of probabilities: CPU kernels that keep one number per query.

The probabilities of a block of queries stay in the cache, and the gradient recomputes them (Dao et al. 2022, FlashAttention). The
engine's own kernel (``attention.cpp``) or PyTorch's is chosen at run time, by size.

PyTorch's kernels give zeros for a query whose scores are NaN, or all -infinity, but its NaN must reach the loss. The logarithm of
such a query is not finite, or is zero; these cases are computed with explicit probabilities.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.attention import cuda
from burnish.engines.torch.native import Use, declare_kernel
from burnish.engines.torch.runtime.devices import has_narrow_vectors, has_wide_vectors
from burnish.engines.torch.translate.rules import Call, records_one_call, translates
from burnish.kernels.attention import CUDA_ATTENTION, CUDA_ATTENTION_GRAD, FUSED_ATTENTION, FUSED_ATTENTION_GRAD
from burnish.kernels.thresholds import Attention

declare_kernel(
    "attention",
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool zeros) -> (Tensor, Tensor)",
    "attention_gradient(Tensor flow, Tensor query, Tensor key, Tensor value, Tensor result, Tensor logarithms, Tensor? mask,"
    " float scale) -> (Tensor, Tensor, Tensor)",
    use=Use.MOST,
)


def dtypes() -> tuple[ir.DataType, ...]:
    """Return the dtypes of heads with fast kernels: bfloat16 if the processor has vectors for it, but no tiles."""
    return (ir.DataType.FLOAT, ir.DataType.BFLOAT16) if has_narrow_vectors() else (ir.DataType.FLOAT,)


def expect(dtype: ir.DataType) -> None:
    """Start to build the engine's own kernel in the background if heads of this dtype will use it."""
    if dtype == ir.DataType.BFLOAT16 or has_wide_vectors():
        kernels.request("attention")


@records_one_call
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    zeros: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(query key' scale + mask) value.

    Args:
        query: [N, H, M, D], float32 or bfloat16; may be strided, like the others.
        key: [N, H, L, D].
        value: [N, H, L, D].
        mask: float32, added to the scores, with two or four axes that broadcast to [N, H, M, L]; None adds nothing.
        scale: factor of the scores.
        zeros: True if a query without a probability has zeros as its result, and no gradient, in place of NaN.

    Returns:
        The result [N, H, M, D], stored as [N, M, H, D], and the logarithms of the sums of exponentials, [N, H, M], float32.
    """
    operands = (query, key, value, mask)
    if _is_empty(query, key):
        return torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=torch.float32)
    if _suits(query) and (own := kernels.find_operator("attention")) is not None:
        found: tuple[torch.Tensor, torch.Tensor] = own(query, key, value, _of_four_axes(mask), scale, zeros)
        return found
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logarithms = kernel(*map(_by_rows, operands[:3]), attn_mask=_like(mask, query), scale=scale)
    if not _has_probabilities(logarithms):
        result = torch.matmul(_probabilities(query, key, mask, scale, zeros).to(value.dtype), value)
    return result, logarithms


@records_one_call
def attention_gradient(
    flow: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithms: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    zeros: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, in their shapes.

    Args:
        flow: the gradient of the result, [N, H, M, D].
        query, key, value, mask, scale, zeros: the arguments of ``attention``.
        result, logarithms: its results.
    """
    operands = (flow, query, key, value, result, logarithms, mask)
    if _is_empty(query, key):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if _suits(query) and (own := kernels.find_operator("attention_gradient")) is not None:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = own(
            flow, query, key, value, result, logarithms, _of_four_axes(mask), scale
        )
        return found
    if not _has_probabilities(logarithms):
        weights = _probabilities(query, key, mask, scale, zeros)
        flows = torch.matmul(flow, value.transpose(2, 3)).to(weights.dtype)
        scores = torch.ops.aten._softmax_backward_data.default(flows, weights, -1, weights.dtype) * scale
        scores, weights = scores.to(query.dtype), weights.to(query.dtype)
        return torch.matmul(scores, key), torch.matmul(scores.transpose(2, 3), query), torch.matmul(weights.transpose(2, 3), flow)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    rows = map(_by_rows, operands[:5])
    gradients = kernel(*rows, logarithms, 0.0, False, attn_mask=_like(mask, query), scale=scale)
    return gradients[0], gradients[1], gradients[2]


def _is_empty(query: torch.Tensor, key: torch.Tensor) -> bool:
    return query.numel() == 0 or key.numel() == 0


def _suits(query: torch.Tensor) -> bool:
    return query.dtype == torch.bfloat16 or (query.shape[2] >= Attention.FEWEST_QUERIES and has_wide_vectors())


def _has_probabilities(logarithms: torch.Tensor) -> bool:
    """True if every query has a probability for some key; also False if a sum of exponentials is exactly one."""
    return bool(logarithms.isfinite().all()) and bool(logarithms.all())


def _probabilities(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float, zeros: bool) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    return torch.where(weights.isnan(), 0.0, weights) if zeros else weights


def _of_four_axes(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask if mask is None or mask.dim() == 4 else mask[None, None]


def _like(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else mask.to(query.dtype)


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """Return the same values with contiguous rows, which the kernels require."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


@translates(FUSED_ATTENTION)
def fused_attention(op: Call) -> Any:
    """Translate (query, transposed key, value, optional mask) -> the result and the logarithms of the sums of exponentials."""
    expect(op.dtype(0))
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    results = attention(op.tensor(0), op.tensor(1).transpose(2, 3), op.tensor(2), op.optional(3), *settings)
    return results[0], results[1]


@translates(FUSED_ATTENTION_GRAD)
def fused_attention_gradient(op: Call) -> Any:
    """Translate (flow, query, transposed key, value, result, logarithms, optional mask) -> the gradients of the three heads."""
    heads = op.tensor(1), op.tensor(2).transpose(2, 3), op.tensor(3)
    settings = op.attribute("scale"), bool(op.attribute("zeros"))
    results = attention_gradient(op.tensor(0), *heads, op.tensor(4), op.tensor(5), op.optional(6), *settings)
    return results[0], results[1].transpose(2, 3), results[2]


@translates(CUDA_ATTENTION)
def cuda_attention(op: Call) -> Any:
    """Translate (query, transposed key, value, optional mask) -> the result, and the inputs of its gradient."""
    heads = op.tensor(0), op.tensor(1).transpose(2, 3), op.tensor(2)
    results = cuda.attention(*heads, op.optional(3), *_settings(op))
    return tuple(results[place] for place in range(len(CUDA_ATTENTION.outputs)))


@translates(CUDA_ATTENTION_GRAD)
def cuda_attention_gradient(op: Call) -> Any:
    """Translate (flow, query, transposed key, value, outputs of attention, optional mask) -> the gradients of the three heads."""
    heads = op.tensor(1), op.tensor(2).transpose(2, 3), op.tensor(3)
    kept = op.tensor(4), op.tensor(5), op.tensor(6), op.tensor(7)
    results = cuda.attention_gradient(op.tensor(0), *heads, *kept, op.optional(8), *_settings(op))
    return results[0], results[1].transpose(2, 3), results[2]


def _settings(op: Call) -> tuple[float, bool, bool]:
    return op.attribute("scale"), bool(op.attribute("zeros")), bool(op.attribute("causal"))
