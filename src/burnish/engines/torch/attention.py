"""Scaled dot-product attention without a matrix of probabilities: PyTorch's kernels for the CPU, which keep one number per query.

The probabilities of a block of queries stay in the cache; the gradient computes them again (Dao et al. 2022, FlashAttention). The
functions are called as a graph runs, when the sizes are known.

These kernels give zeros for a query without a probability: one whose scores are not numbers, or are -infinity throughout. Its NaN
must reach the loss. Such a query has no finite logarithm, or zero, so that what has one is computed with its probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(query key' scale + mask) value, float32.

    Args:
        query: [N, H, M, D]; like the others it may be strided.
        key: [N, H, L, D].
        value: [N, H, L, D].
        mask: added to the scores, of a shape that broadcasts to [N, H, M, L]; None adds nothing.
        scale: of the scores.

    Returns:
        The result [N, H, M, D], which lies in memory as [N, M, H, D], and the logarithms of the sums of exponentials, [N, H, M].
    """
    operands = (query, key, value, mask)
    if has_torch_function(operands):  # a graph that is being made: one call in it
        traced: Any = handle_torch_function(attention, operands, *operands, scale)
        return traced[0], traced[1]
    if _is_empty(query, key):
        return torch.zeros_like(query), query.new_zeros(query.shape[:3])
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logarithms = kernel(*map(_by_rows, operands[:3]), attn_mask=mask, scale=scale)
    if not _has_probabilities(logarithms):
        result = torch.matmul(_probabilities(query, key, mask, scale), value)
    return result, logarithms


def attention_gradient(
    flow: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithms: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, each of its shape.

    Args:
        flow: the gradient of the result, [N, H, M, D].
        query, key, value, mask, scale: as ``attention`` got them.
        result, logarithms: what it returned.
    """
    operands = (flow, query, key, value, result, logarithms, mask)
    if has_torch_function(operands):
        traced: Any = handle_torch_function(attention_gradient, operands, *operands, scale)
        return traced[0], traced[1], traced[2]
    if _is_empty(query, key):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if not _has_probabilities(logarithms):
        weights = _probabilities(query, key, mask, scale)
        flows = torch.matmul(flow, value.transpose(2, 3))
        scores = torch.ops.aten._softmax_backward_data.default(flows, weights, -1, weights.dtype) * scale
        return torch.matmul(scores, key), torch.matmul(scores.transpose(2, 3), query), torch.matmul(weights.transpose(2, 3), flow)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    rows = map(_by_rows, operands[:5])
    gradients = kernel(*rows, logarithms, 0.0, False, attn_mask=mask, scale=scale)
    return gradients[0], gradients[1], gradients[2]


def _is_empty(query: torch.Tensor, key: torch.Tensor) -> bool:
    return query.numel() == 0 or key.numel() == 0


def _has_probabilities(logarithms: torch.Tensor) -> bool:
    """Whether every query has a probability for some key; False, too, where a sum of exponentials is one by chance."""
    return bool(logarithms.isfinite().all()) and bool(logarithms.all())


def _probabilities(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    return torch.softmax(scores if mask is None else scores + mask, -1)


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """The same values, those of a row side by side, which the kernels take for granted."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
