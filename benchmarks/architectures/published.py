"""Networks in the sizes that they were published in, each by one function: what a step is timed of beside PyTorch.

There is no dropout and no stochastic depth, so that steps compare exactly. Residual branches that end in a batch normalization
start at zero (Goyal et al. 2017, section 5.1), without which gradients of the first steps are badly conditioned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from architectures import images, text
from architectures.pixels import DeepLab, convolution


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    """EfficientNet-B0 (Tan and Le 2019). Input [batch, 3, 224, 224]."""
    stages = (  # expansion, channels, blocks, stride, kernel
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    layers: list[nn.Module] = [convolution(3, 32, 3, 2, activation=nn.SiLU)]
    channels = 32
    for expansion, channels_out, blocks, stride, kernel in stages:
        for index in range(blocks):
            layers.append(
                MobileBlock(
                    channels,
                    expansion * channels,
                    channels_out,
                    kernel,
                    stride if index == 0 else 1,
                    activation=nn.SiLU,
                    squeezed=channels // 4,
                    gate=nn.Sigmoid,
                )
            )
            channels = channels_out
    layers.append(convolution(channels, 1280, 1, activation=nn.SiLU))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


def mobilenet_v3_large(classes: int = 1000) -> nn.Module:
    """MobileNetV3-Large (Howard et al. 2019, table 1). Input [batch, 3, 224, 224]."""
    blocks = (  # expanded channels, channels, kernel, stride, channels within squeeze and excitation, activation
        (16, 16, 3, 1, 0, nn.ReLU),
        (64, 24, 3, 2, 0, nn.ReLU),
        (72, 24, 3, 1, 0, nn.ReLU),
        (72, 40, 5, 2, 24, nn.ReLU),
        (120, 40, 5, 1, 32, nn.ReLU),
        (120, 40, 5, 1, 32, nn.ReLU),
        (240, 80, 3, 2, 0, nn.Hardswish),
        (200, 80, 3, 1, 0, nn.Hardswish),
        (184, 80, 3, 1, 0, nn.Hardswish),
        (184, 80, 3, 1, 0, nn.Hardswish),
        (480, 112, 3, 1, 120, nn.Hardswish),
        (672, 112, 3, 1, 168, nn.Hardswish),
        (672, 160, 5, 2, 168, nn.Hardswish),
        (960, 160, 5, 1, 240, nn.Hardswish),
        (960, 160, 5, 1, 240, nn.Hardswish),
    )
    layers: list[nn.Module] = [convolution(3, 16, 3, 2, activation=nn.Hardswish)]
    channels = 16
    for expanded, channels_out, kernel, stride, squeezed, activation in blocks:
        layers.append(
            MobileBlock(
                channels,
                expanded,
                channels_out,
                kernel,
                stride,
                activation=activation,
                squeezed=squeezed,
                squeezed_activation=nn.ReLU,
                gate=nn.Hardsigmoid,
            )
        )
        channels = channels_out
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, classes))
    return nn.Sequential(*layers, convolution(channels, 960, 1, activation=nn.Hardswish), *head)


class MobileBlock(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, and linear projection.

    Args:
        channels_in, expanded, channels_out: channels before, within and after the block.
        kernel, stride: of the depthwise convolution.
        activation: after the expansion and after the depthwise convolution.
        squeezed: channels within squeeze and excitation (Hu et al. 2017); 0 for none.
        gate: what makes factors of its outputs.
        squeezed_activation: within it; None for ``activation``.
    """

    def __init__(
        self,
        channels_in: int,
        expanded: int,
        channels_out: int,
        kernel: int,
        stride: int,
        *,
        activation: type[nn.Module],
        squeezed: int,
        gate: type[nn.Module],
        squeezed_activation: type[nn.Module] | None = None,
    ):
        super().__init__()
        self.expand = convolution(channels_in, expanded, 1, activation=activation) if expanded != channels_in else nn.Identity()
        self.depthwise = convolution(expanded, expanded, kernel, stride, groups=expanded, activation=activation)
        self.excite: nn.Module | None = None
        if squeezed:
            self.excite = nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(expanded, squeezed, 1),
                (squeezed_activation or activation)(),
                nn.Conv2d(squeezed, expanded, 1),
                gate(),
            )
        self.project = convolution(expanded, channels_out, 1, activation=nn.Identity)
        self.residual = stride == 1 and channels_in == channels_out
        if self.residual:
            nn.init.zeros_(self.project[1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(self.expand(x))
        if self.excite is not None:
            y = y * self.excite(y)
        y = self.project(y)
        return x + y if self.residual else y


def densenet121(classes: int = 1000, growth: int = 32, blocks: Sequence[int] = (6, 12, 24, 16)) -> nn.Module:
    """DenseNet-121 (Huang et al. 2016). Input [batch, 3, 224, 224]."""
    channels = 2 * growth
    stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for index, count in enumerate(blocks):
        if index:
            halved = channels // 2
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, halved, 1, bias=False), nn.AvgPool2d(2)]
            channels = halved
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    head = (nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, *head)


class DenseLayer(nn.Module):
    """A bottleneck whose ``growth`` channels are joined to those that it read."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], 1)


def deeplab_resnet50(classes: int = 21) -> nn.Module:
    """DeepLabv3 on ResNet-50 (Chen et al. 2017), whose last two stages dilate in place of striding. Input [batch, 3, H, W]."""
    backbone: list[nn.Module] = [convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride, dilation in ((64, 3, 1, 1), (128, 4, 2, 1), (256, 6, 1, 2), (512, 3, 1, 4)):
        for index in range(blocks):
            first = index == 0
            # The first block of a stage keeps the dilation of the stage before it.
            dilated = max(1, dilation // 2) if first else dilation
            backbone.append(DilatedBottleneck(channels, width, stride if first else 1, dilated))
            channels = 4 * width
    return DeepLab(256, classes, (12, 24, 36), nn.Sequential(*backbone), channels)


class DilatedBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch normalization and a shortcut (He et al. 2015), the middle one dilated."""

    def __init__(self, channels_in: int, width: int, stride: int, dilation: int):
        super().__init__()
        self.layers = nn.Sequential(
            convolution(channels_in, width, 1),
            convolution(width, width, 3, stride, dilation),
            convolution(width, 4 * width, 1, activation=nn.Identity),
        )
        nn.init.zeros_(self.layers[2][1].weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != 4 * width:
            self.shortcut = convolution(channels_in, 4 * width, 1, stride, activation=nn.Identity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.layers(x) + self.shortcut(x))


def r3d_18(classes: int = 400) -> nn.Module:
    """R3D-18 (Tran et al. 2018). Input [batch, 3, 16, 112, 112]."""
    module = images.VideoResNet(64, classes, stages=4, blocks=2)
    for block in module.blocks:
        nn.init.zeros_(block.bn2.weight)
    return module


class ChannelNorm(nn.Module):
    """Layer normalization over the channels of [batch, channels, height, width]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7x7, layer normalization and two linear layers, scaled (Liu et al. 2022)."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)


def convnext_tiny(classes: int = 1000) -> nn.Module:
    """ConvNeXt-T (Liu et al. 2022). Input [batch, 3, 224, 224]."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)]
    channels = 96
    for index, blocks in enumerate((3, 3, 9, 3)):
        if index:
            layers += [ChannelNorm(channels), nn.Conv2d(channels, 2 * channels, 2, 2)]
            channels *= 2
        layers += [ConvNeXtBlock(channels) for _ in range(blocks)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, classes))
    return nn.Sequential(*layers, *head)


def vit_small(classes: int = 1000) -> nn.Module:
    """ViT-S/16 (Dosovitskiy et al. 2020; Touvron et al. 2020 for the size). Input [batch, 3, 224, 224]."""
    return images.Vit("sdpa", 224, 16, width=384, heads=6, layers=12, classes=classes)


GPT2_VOCABULARY = 50257


def gpt2_small() -> nn.Module:
    """GPT-2 of 124 million parameters (Radford et al. 2019). Input [batch, tokens], output [batch, vocabulary, tokens]."""
    module = text.Gpt2("sdpa", 768, 12, 12, 1024, GPT2_VOCABULARY)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
    return module
