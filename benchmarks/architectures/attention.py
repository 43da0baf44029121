"""Attention as it is written out, and as PyTorch's operator of it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

Style = Literal["eager", "sdpa"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    style: Style,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) over [batch, heads, tokens, width].

    Args:
        query, key, value: of as many heads each.
        style: written out, or PyTorch's operator.
        mask: where a query may look, bool, broadcast to [batch, heads, queries, keys].
        bias: what is added to the scores, broadcast alike.
        causal: whether no query sees the keys after it.
        scale: of the scores; None is one over the root of the width.
    """
    if style == "sdpa":
        extra = bias if mask is None else mask
        if mask is not None and bias is not None:
            extra = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        return scaled_dot_product_attention(query, key, value, extra, is_causal=causal, scale=scale)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ value


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, tokens, width] -> [batch, heads, tokens, width / heads]."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, width] -> [batch, tokens, heads · width]."""
    x = x.transpose(1, 2)
    return x.reshape(x.shape[0], x.shape[1], x.shape[2] * x.shape[3])


class SelfAttention(nn.Module):
    """Multi-head self-attention with a projection for each of query, key and value, as BERT's."""

    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.heads, self.style = heads, style

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = (split_heads(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        return self.output(join_heads(attend(query, key, value, self.style, mask=mask)))
