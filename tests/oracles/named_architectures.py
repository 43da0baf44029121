"""Architectures that people name, with the blocks and the depth of the originals and few channels, and what they are fed.

The convolutional ones are written as torchvision writes them; BERT and GPT-2 are those of transformers, small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

CLASSES, PIXELS, TOKENS, VOCABULARY = 4, 32, 6, 32


def normalized(
    channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> nn.Sequential:
    """A convolution, batch normalization and an activation."""
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), *([act()] if act is not None else []))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015)."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        is_same = stride == 1 and channels_in == channels
        self.downsample = None if is_same else normalized(channels_in, channels, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def resnet18(width: int = 8) -> nn.Sequential:
    channels = [width << stage for stage in range(4)]
    blocks = [
        BasicBlock(before if block == 0 else after, after, 2 if block == 0 and stage else 1)
        for stage, (before, after) in enumerate(zip([width, *channels], channels, strict=False))
        for block in range(2)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES))
    return nn.Sequential(normalized(3, width, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide, and a shortcut (He et al. 2015; the stride in the 3x3)."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.inner = nn.Sequential(
            normalized(channels_in, channels, 1),
            normalized(channels, channels, 3, stride),
            normalized(channels, 4 * channels, 1, act=None),
        )
        is_same = stride == 1 and channels_in == 4 * channels
        self.downsample = None if is_same else normalized(channels_in, 4 * channels, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + (x if self.downsample is None else self.downsample(x)))


def resnet50(width: int = 4) -> nn.Sequential:
    blocks: list[nn.Module] = []
    before = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        channels = width << stage
        for block in range(depth):
            blocks.append(Bottleneck(before, channels, 2 if block == 0 and stage else 1))
            before = 4 * channels
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))
    return nn.Sequential(normalized(3, width, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, *head)


class LinearBottleneck(nn.Module):
    """Expansion, a depthwise convolution and a linear projection (Sandler et al. 2018)."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int):
        super().__init__()
        wide = expansion * channels_in
        expand = [normalized(channels_in, wide, 1, act=nn.ReLU6)] if expansion > 1 else []
        self.layers = nn.Sequential(
            *expand, normalized(wide, wide, 3, stride, wide, nn.ReLU6), normalized(wide, channels, 1, act=None)
        )
        self.adds = stride == 1 and channels_in == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenetv2() -> nn.Sequential:
    settings = [(8, 4, 1, 1), (4, 6, 2, 6), (6, 6, 1, 6), (6, 8, 2, 6), (8, 8, 1, 6)]
    head = (normalized(8, 24, 1, act=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(24, CLASSES))
    return nn.Sequential(
        normalized(3, 8, 3, 2, act=nn.ReLU6),
        *(LinearBottleneck(*setting) for setting in settings),
        *head,
    )


class Inverted(nn.Module):
    """Expansion, a depthwise convolution, squeeze and excitation, and a linear projection (EfficientNet)."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int, act: Any, gate: Any, expansion: int = 3):
        super().__init__()
        wide = expansion * channels_in
        self.expand = normalized(channels_in, wide, 1, act=act)
        self.depthwise = normalized(wide, wide, kernel, stride, wide, act)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(), nn.Conv2d(4, wide, 1), gate())
        self.project = normalized(wide, channels, 1, act=None)
        self.adds = stride == 1 and channels_in == channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.depthwise(self.expand(x))
        inner = self.project(self.squeeze(inner) * inner)
        return x + inner if self.adds else inner


def inverted_network(act: Any, gate: Any) -> nn.Sequential:
    settings = [(8, 8, 3, 2), (8, 8, 3, 1), (8, 12, 5, 2), (12, 12, 5, 1), (12, 16, 5, 2)]
    blocks = [Inverted(*setting, act, gate) for setting in settings]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 24), act(), nn.Dropout(0.0), nn.Linear(24, CLASSES))
    return nn.Sequential(normalized(3, 8, 3, 2, act=act), *blocks, normalized(16, 32, 1, act=act), *head)


class DenseBlock(nn.Module):
    """Each layer reads what all layers before it computed, through a bottleneck (Huang et al. 2016)."""

    def __init__(self, channels: int, layers: int, growth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * growth, 1, bias=False),
                nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for width in range(channels, channels + growth * layers, growth)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def densenet() -> nn.Sequential:
    between = (nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1, bias=False), nn.AvgPool2d(2))
    head = (nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))
    return nn.Sequential(normalized(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), DenseBlock(8, 2), *between, DenseBlock(8, 2), *head)


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each after a layer normalization and added to what it read (torchvision's)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        normed = self.ln_1(tokens)
        tokens = tokens + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return tokens + self.mlp(self.ln_2(tokens))


class VisionTransformer(nn.Module):
    """Patches of an image and a token for its class through attention (Dosovitskiy et al. 2020)."""

    def __init__(self, width: int = 12, patch: int = 8, layers: int = 2, heads: int = 2):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, (PIXELS // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), patches], dim=1) + self.pos_embedding
        return self.head(self.ln(self.layers(tokens))[:, 0])


def double_convolution(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(normalized(channels_in, channels, 3), normalized(channels, channels, 3))


class UNet(nn.Module):
    """Two levels down and up again; transposed convolutions, and what each level had joined in (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.down = nn.ModuleList([double_convolution(3, width), double_convolution(width, 2 * width)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_convolution(2 * width, 4 * width)
        self.up = nn.ModuleList([nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)])
        self.joined = nn.ModuleList([double_convolution(4 * width, 2 * width), double_convolution(2 * width, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class SequenceClassifier(nn.Module):
    """Embedded tokens, padding among them, through an LSTM of two layers in both directions; the last states are read."""

    def __init__(self, width: int = 6, hidden: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.head(torch.cat([hidden[-2], hidden[-1]], dim=1))


def bert() -> nn.Module:
    import transformers

    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def _images(batch: int, generator: torch.Generator, pixels: int = PIXELS) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(batch, 3, pixels, pixels, generator=generator)}


def _tokens(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, VOCABULARY, (batch, TOKENS), generator=generator)}


def _sentences(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (batch, TOKENS), generator=generator)
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, TOKENS - 2] * batch)[:batch, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(CLASSES, (batch,), generator=generator)}


def _continued(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (batch, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True)
class Named:
    """An architecture.

    Attributes:
        build: makes it with weights of PyTorch's generator.
        inputs: makes a batch of a size, by name; with ``labels`` the module returns its loss.
        relative: the error of gradients in float64; transformers computes the loss of language models in float32, and the
            gradient of PyTorch's ``Hardsigmoid`` has a sixth of float32, which errs by 3e-8.
        labelled: what has a label beside a sample: the axes of an image where each pixel does.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    relative: float = 1e-10
    labelled: tuple[int, ...] = ()

    def module(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        module = self.build().train()
        for part in module.modules():
            if isinstance(getattr(part, "eps", None), float):
                part.eps = float(np.float32(part.eps))  # as ONNX holds it
            if isinstance(part, nn.BatchNorm2d):
                nn.init.normal_(part.weight, 1.0, 0.1), nn.init.normal_(part.bias, 0.0, 0.1)
        return module.to(dtype)


NAMED: Mapping[str, Named] = {
    "resnet18": Named(resnet18, _images),
    "resnet50": Named(resnet50, lambda batch, generator: _images(batch, generator, 2 * PIXELS)),
    "mobilenetv2": Named(mobilenetv2, _images),
    "mobilenetv3": Named(lambda: inverted_network(nn.Hardswish, nn.Hardsigmoid), _images, relative=1e-7),
    "efficientnet": Named(lambda: inverted_network(nn.SiLU, nn.Sigmoid), _images),
    "densenet": Named(densenet, _images),
    "vit": Named(VisionTransformer, _images),
    "unet": Named(UNet, lambda batch, generator: _images(batch, generator, 16), labelled=(16, 16)),
    "lstm": Named(SequenceClassifier, _tokens),
    "bert": Named(bert, _sentences),
    "gpt2": Named(gpt2, _continued, relative=1e-6),
}
