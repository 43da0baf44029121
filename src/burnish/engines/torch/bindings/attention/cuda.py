"""Scaled dot-product attention on CUDA without a matrix of probabilities, with PyTorch's forward and backward kernels.

Flash attention (Dao et al. 2022) takes sixteen bits, with no mask or a causal one. The memory-efficient kernels (Rabe and Staats
2021) take float32, whose products are composed of three in TF32, and any mask that is added to the scores. Only dtype and mask
decide which one runs, so a graph is the same on every card that has both.

Both give zeros for a query that may see no key, but ONNX requires NaN. Such queries are found from their mask, on the device. A
query whose scores overflow to -infinity stays zero.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.rules import records_one_call
from burnish.kernels.attention import ALIGNMENT

LEAST_CAPABILITY = (8, 0)
"""The least capability of a card with flash attention in PyTorch."""
_aten = torch.ops.aten


def dtypes(device: torch.device) -> tuple[ir.DataType, ...]:
    """Return the dtypes of heads with PyTorch kernels on a CUDA device."""
    if not torch.backends.cuda.is_flash_attention_available() or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return ()
    return ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16


@records_one_call
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    zeros: bool,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return softmax(query key' scale + mask) value.

    Args:
        query: [N, H, M, D], float32, float16 or bfloat16; may be strided, like the others.
        key, value: [N, H, L, D].
        mask: float32, added to the scores, with two or four axes that broadcast to [N, H, M, L]; sixteen-bit heads round it to
            their dtype. None adds nothing.
        scale: factor of the scores.
        zeros: True if a query that may see no key has zeros as its result, and no gradient, in place of NaN.
        causal: True if a query sees only keys up to its own position; then M is L, and there is no mask.

    Returns:
        The result [N, H, M, D], the logarithms of the sums of exponentials [N, H, M or more], float32, and two tensors for the
        gradient.
    """
    heads = [_by_rows(each) for each in (query, key, value)]
    if _is_flash(query, mask):
        flash = _aten._scaled_dot_product_flash_attention.default(*heads, 0.0, causal, scale=scale)
        return flash[0], flash[1], flash[6], flash[7]
    bias = _bias(mask, query, key)
    kernel = _aten._scaled_dot_product_efficient_attention.default
    result, logarithms, seed, offset = kernel(*heads, bias, True, 0.0, causal, scale=scale)
    if mask is not None:
        result = torch.where(_sees_a_key(mask), result, 0.0 if zeros else math.nan)
    return result, logarithms, seed, offset


@records_one_call
def attention_gradient(
    flow: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    logarithms: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    zeros: bool,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, in their shapes.

    Args:
        flow: the gradient of the result, [N, H, M, D].
        query, key, value, mask, scale, zeros, causal: the arguments of ``attention``.
        result, logarithms, seed, offset: its results.
    """
    heads = [_by_rows(each) for each in (query, key, value)]
    if _is_flash(query, mask):
        lengths = None, None, query.shape[2], key.shape[2]
        gradients = _aten._scaled_dot_product_flash_attention_backward.default(
            _by_rows(flow), *heads, result, logarithms, *lengths, 0.0, causal, seed, offset, scale=scale
        )
        return gradients[0], gradients[1], gradients[2]
    if mask is not None:
        sees = _sees_a_key(mask)
        # With a zero result and flow, such a query has no effect; with a NaN flow, everything that it read gets NaN.
        flow = torch.where(sees, flow, 0.0 if zeros else math.nan)
        result = torch.where(sees, result, 0.0)
    kept = _bias(mask, query, key), _by_tokens(result), logarithms, seed, offset
    gradients = _aten._scaled_dot_product_efficient_attention_backward.default(
        _by_tokens(flow), *heads, *kept, 0.0, [True, True, True, False], causal, scale=scale
    )
    return gradients[0], gradients[1], gradients[2]


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and query.dtype != torch.float32


def _sees_a_key(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask that is true for queries that may see a key; it broadcasts to [N, H, M, 1]."""
    return (mask > -math.inf).any(-1, keepdim=True)


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask for the kernels: [N, H, M, L] of the heads' dtype, with zeros for a query that may see no key.

    Rows are aligned to multiples of ``ALIGNMENT``; broadcast axes have a stride of zero.
    """
    if mask is None:
        return None
    mask = mask if mask.dim() == 4 else mask.unsqueeze(0).unsqueeze(0)
    bias = torch.where(_sees_a_key(mask), mask, 0.0).to(query.dtype)
    columns = key.shape[2]
    bias = bias.expand(*bias.shape[:3], columns)
    rest = -columns % (ALIGNMENT // query.element_size())
    padded = torch.nn.functional.pad(bias, (0, rest)) if rest else bias.contiguous()
    return padded.narrow(-1, 0, columns).expand(query.shape[0], query.shape[1], query.shape[2], columns)


def _by_rows(heads: torch.Tensor) -> torch.Tensor:
    """Return the same values with contiguous rows."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _by_tokens(heads: torch.Tensor) -> torch.Tensor:
    """Return the same values, stored as [N, M, H, D], as the memory-efficient gradient requires for results and flows."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)
