"""Transformers over tokens: BERT, DistilBERT, GPT-2, Llama, T5."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import gelu, linear, silu

from architectures.attention import SelfAttention, Style, attend, join_heads, split_heads

VOCABULARY = 640
"""More rows than the exporter keeps constants below inside a file."""


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each followed by layer normalization (Vaswani et al. 2017) with GELU."""

    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.attention = SelfAttention(width, heads, style)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.down(gelu(self.up(x))))


class Bert(nn.Module):
    """BERT (Devlin et al. 2018) as a classifier of the first token, pooled; without ``sentences`` and pooler, DistilBERT.

    Inputs: token numbers [batch, tokens] and the mask of those that are no padding, both int64.
    """

    def __init__(
        self,
        style: Style,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        classes: int = 5,
        sentences: bool = True,
        positions: int = 64,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.sentences = nn.Embedding(2, width) if sentences else None
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, style) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        if self.sentences is not None:
            x = x + self.sentences(torch.zeros_like(input_ids))
        x, mask = self.norm(x), attention_mask[:, None, None, :] != 0
        for layer in self.layers:
            x = layer(x, mask)
        pooled = self.pooler(x[:, 0])
        return self.classifier(torch.tanh(pooled) if self.sentences is not None else torch.relu(pooled))


class Projection(nn.Module):
    """A linear layer that keeps its weight as [in, out], as GPT-2's."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return product.view(x.shape[0], x.shape[1], self.weight.shape[1])


class DecoderLayer(nn.Module):
    """A layer of GPT-2: layer normalization before causal attention and before the feed-forward network."""

    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = Projection(width, 3 * width), Projection(width, width)
        self.up, self.down = Projection(width, 4 * width), Projection(4 * width, width)
        self.width, self.heads, self.style = width, heads, style

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.first_norm(x)).split(self.width, dim=2)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        x = x + self.output(join_heads(attend(query, key, value, self.style, causal=True)))
        return x + self.down(gelu(self.up(self.second_norm(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """GPT-2 (Radford et al. 2019): the head is the embedding. Input [batch, tokens], output [batch, vocabulary, tokens]."""

    def __init__(
        self,
        style: Style,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        positions: int = 64,
        vocabulary: int = VOCABULARY,
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, style) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.rows(input_ids).transpose(1, 2)

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The scores as the head gives them, [batch, tokens, vocabulary]."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    """x / root(mean x² + ε) · weight (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021), the halves of a head as real and imaginary parts."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions, and a gated feed-forward network, after RMS normalization each."""

    def __init__(self, width: int, heads: int, groups: int, style: Style):
        super().__init__()
        head = width // heads
        self.first_norm, self.second_norm = RmsNorm(width), RmsNorm(width)
        self.query, self.output = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, groups * head, bias=False), nn.Linear(width, groups * head, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.heads, self.groups, self.style = heads, groups, style

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        y = self.first_norm(x)
        query = rotate(split_heads(self.query(y), self.heads), cosine, sine)
        key, value = rotate(split_heads(self.key(y), self.groups), cosine, sine), split_heads(self.value(y), self.groups)
        key, value = (self.for_every_head(part) for part in (key, value))
        x = x + self.output(join_heads(attend(query, key, value, self.style, causal=True)))
        y = self.second_norm(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))

    def for_every_head(self, x: torch.Tensor) -> torch.Tensor:
        batch, groups, tokens, head = x.shape
        repeated = x[:, :, None].expand(batch, groups, self.heads // self.groups, tokens, head)
        return repeated.reshape(batch, self.heads, tokens, head)


class Llama(nn.Module):
    """Llama (Touvron et al. 2023) with grouped queries (Ainslie et al. 2023). Input [batch, tokens], output as GPT-2's."""

    def __init__(self, style: Style, width: int = 32, heads: int = 4, groups: int = 2, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, style) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(half) / half))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=x.device).to(x.dtype)
        angles = (positions[:, None] * self.frequencies).repeat(1, 2)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x)).transpose(1, 2)


class T5Attention(nn.Module):
    """Attention without biases and without a scale, to which the bias of relative positions is added."""

    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.style = heads, style

    def forward(self, x: torch.Tensor, source: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        query = split_heads(self.query(x), self.heads)
        key, value = split_heads(self.key(source), self.heads), split_heads(self.value(source), self.heads)
        return self.output(join_heads(attend(query, key, value, self.style, bias=bias, scale=1.0)))


class RelativeBias(nn.Module):
    """A trained bias of scores for each head and bucket of distances: near ones alone, far ones in logarithmic steps."""

    def __init__(self, heads: int, causal: bool, buckets: int = 8, farthest: int = 16):
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.causal, self.buckets, self.farthest = causal, buckets, farthest

    def forward(self, tokens: int, like: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens, device=like.device)
        distance = positions[None, :] - positions[:, None]
        buckets, first = self.buckets, torch.zeros_like(distance)
        if self.causal:
            distance = -torch.clamp(distance, max=0)
        else:
            buckets //= 2
            first = (distance > 0).long() * buckets
            distance = distance.abs()
        exact = buckets // 2
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.farthest / exact) * (buckets - exact)
        far = (exact + far.long()).clamp(max=buckets - 1)
        bias = self.table(first + torch.where(distance < exact, distance, far)).permute(2, 0, 1)[None]
        if self.causal:
            seen = positions[None, :] <= positions[:, None]
            bias = bias.masked_fill(~seen, torch.finfo(bias.dtype).min)
        return bias


class T5Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder, and a feed-forward network, after RMS normalization each."""

    def __init__(self, width: int, heads: int, style: Style, decoder: bool):
        super().__init__()
        self.attention, self.attention_norm = T5Attention(width, heads, style), RmsNorm(width)
        self.cross = T5Attention(width, heads, style) if decoder else None
        self.cross_norm = RmsNorm(width) if decoder else None
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.norm = RmsNorm(width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and self.cross_norm is not None and encoded is not None:
            x = x + self.cross(self.cross_norm(x), encoded, None)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class T5(nn.Module):
    """T5 (Raffel et al. 2019). Inputs: tokens of the source and of the target, [batch, tokens]; output as GPT-2's.

    One table of relative positions serves all layers of the encoder, one those of the decoder; the head is the embedding.
    """

    def __init__(self, style: Style, width: int = 32, heads: int = 4, layers: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(T5Layer(width, heads, style, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Layer(width, heads, style, decoder=True) for _ in range(layers))
        self.encoder_bias, self.decoder_bias = RelativeBias(heads, causal=False), RelativeBias(heads, causal=True)
        self.encoder_norm, self.decoder_norm = RmsNorm(width), RmsNorm(width)
        self.width = width

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        encoded = self.tokens(input_ids)
        bias = self.encoder_bias(input_ids.shape[1], encoded)
        for layer in self.encoder:
            encoded = layer(encoded, bias)
        encoded = self.encoder_norm(encoded)
        x = self.tokens(decoder_input_ids)
        bias = self.decoder_bias(decoder_input_ids.shape[1], x)
        for layer in self.decoder:
            x = layer(x, bias, encoded)
        return linear(self.decoder_norm(x) * self.width**-0.5, self.tokens.weight).transpose(1, 2)
