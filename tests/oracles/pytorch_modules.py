"""Small PyTorch modules of the architectures that people train, each with a batch: for runs beside PyTorch itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Two convolutions with batch normalization, and the input added."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1):
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(inner + self.shortcut(x))


class InvertedResidual(nn.Module):
    """Expansion, a depthwise convolution, squeeze and excitation, and a linear projection (MobileNetV3, EfficientNet)."""

    def __init__(self, channels: int, activation: type[nn.Module], gate: type[nn.Module]):
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), activation())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide, momentum=0.01), activation()
        )
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 2, 1), nn.ReLU(), nn.Conv2d(2, wide, 1), gate())
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.depthwise(self.expand(x))
        return x + self.project(inner * self.squeeze(inner))


class DenseBlock(nn.Module):
    """Each layer reads what all layers before it computed (DenseNet)."""

    def __init__(self, channels: int, growth: int = 2, layers: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False))
            for width in range(channels, channels + growth * layers, growth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return functional.avg_pool2d(x, 2)


def image_network(*blocks: nn.Module, channels: int = 4, classes: int = 5, outputs: int | None = None) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.0),
        nn.Linear(outputs or channels, classes),
    )


class Transformer(nn.Module):
    """Patches of an image through attention with layer normalization (ViT)."""

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1) + self.position
        return self.head(self.norm(self.layer(tokens))[:, 0])


class LanguageModel(nn.Module):
    """Causal attention over tokens, with the embedding as head (GPT-2)."""

    def __init__(self, vocabulary: int = 11, width: int = 8, length: int = 6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 16), nn.GELU(approximate="tanh"), nn.Linear(16, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.embedding(tokens) + self.position(torch.arange(length, device=tokens.device))
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return self.head(x + self.inner(self.norm2(x)))


class Recurrent(nn.Module):
    """A classifier of sequences: an embedding that is not trained for padding, and an LSTM."""

    def __init__(self, vocabulary: int = 11, width: int = 4, classes: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, 6, batch_first=True)
        self.head = nn.Linear(6, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class UNet(nn.Module):
    """One level down and up again, with what was there joined in."""

    def __init__(self, width: int = 4, classes: int = 3):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.inner = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width), nn.SiLU()
        )
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        across = self.down(x)
        return self.head(torch.cat([across, self.up(self.inner(across))], 1))


class Structured(nn.Module):
    """Several inputs by name, and a dictionary with the loss among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 6)
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.scale * self.head(torch.tanh(self.first(a) + self.second(b)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@dataclass(frozen=True)
class ModuleCase:
    """A module to build, and the arguments of a call.

    Attributes:
        build: makes it with weights of PyTorch's generator.
        inputs: makes a batch of a size: what ``forward`` takes.
        by_name: whether they are given by their names.
        relative: the error in float64 that the digits of its constants in ONNX allow: a sixth, of HardSwish, is float32 there.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], dict[str, torch.Tensor]]
    by_name: bool = False
    relative: float = 1e-9


def _images(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 1, 8, 8, generator=generator, dtype=torch.float64)}


def _tokens(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 11, (batch, 6), generator=generator)}


def _vectors(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 4, generator=generator, dtype=torch.float64)}


def _structured(batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    a, b = (torch.randn(batch, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    return {"a": a, "b": b, "labels": torch.randint(0, 5, (batch,), generator=generator)}


MODULES: dict[str, ModuleCase] = {
    "perceptron": ModuleCase(lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5)), _vectors),
    "residual": ModuleCase(lambda: image_network(Residual(4, 6, 2), outputs=6), _images),
    "mobile": ModuleCase(lambda: image_network(InvertedResidual(4, nn.Hardswish, nn.Hardsigmoid)), _images, relative=1e-7),
    "efficient": ModuleCase(lambda: image_network(InvertedResidual(4, nn.SiLU, nn.Sigmoid)), _images),
    "dense": ModuleCase(lambda: image_network(DenseBlock(4), outputs=8), _images),
    "vision_transformer": ModuleCase(Transformer, _images),
    "language_model": ModuleCase(LanguageModel, _tokens),
    "recurrent": ModuleCase(Recurrent, _tokens),
    "unet": ModuleCase(UNet, _images),
    "structured": ModuleCase(Structured, _structured, by_name=True),
}


def tensors_of(outputs: object) -> list[torch.Tensor]:
    """The tensors that a module returned, in their order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return list(outputs.values()) if isinstance(outputs, dict) else list(outputs)  # type: ignore[call-overload]
