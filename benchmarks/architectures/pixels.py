"""A class for every pixel: DeepLab, LR-ASPP, U-Net."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import interpolate


def convolution(
    channels_in: int,
    channels_out: int,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """A convolution that keeps the size but for its stride, batch normalization, activation."""
    pad = dilation * (kernel - 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride, pad, dilation, groups, bias=False),
        nn.BatchNorm2d(channels_out),
        activation(),
    )


class Pooled(nn.Module):
    """The mean of a map, through a 1x1 convolution, at every pixel."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), convolution(channels_in, channels_out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return interpolate(self.layers(x), size=x.shape[-2:], mode="bilinear", align_corners=False)


class DeepLab(nn.Module):
    """DeepLabv3 (Chen et al. 2017): atrous convolutions, pyramid pooling, and bilinear upsampling. Input [batch, 3, H, W]."""

    def __init__(
        self,
        width: int = 8,
        classes: int = 4,
        rates: tuple[int, ...] = (2, 3, 4),
        backbone: nn.Module | None = None,
        channels: int | None = None,
    ):
        """``channels`` is what ``backbone`` returns, 2 * width where none is given."""
        super().__init__()
        channels = channels or 2 * width
        self.backbone = backbone or nn.Sequential(
            convolution(3, width, 3, 2), convolution(width, 2 * width, 3, 2), convolution(2 * width, 2 * width, dilation=2)
        )
        self.branches = nn.ModuleList(
            [
                convolution(channels, width, 1),
                *(convolution(channels, width, 3, dilation=rate) for rate in rates),
                Pooled(channels, width),
            ]
        )
        self.head = nn.Sequential(
            convolution((2 + len(rates)) * width, width, 1), convolution(width, width), nn.Conv2d(width, classes, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone(x)
        y = self.head(torch.cat([branch(y) for branch in self.branches], 1))
        return interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class LrAspp(nn.Module):
    """LR-ASPP on a backbone in the manner of MobileNetV3 (Howard et al. 2019, section 6.4). Input [batch, 3, H, W]."""

    def __init__(self, width: int = 8, classes: int = 4):
        super().__init__()
        self.low = nn.Sequential(
            convolution(3, width, 3, 2, activation=nn.Hardswish),
            convolution(width, width, 3, 2, groups=width, activation=nn.Hardswish),
        )
        self.high = nn.Sequential(
            convolution(width, 2 * width, 1, activation=nn.Hardswish),
            convolution(2 * width, 2 * width, 3, 2, groups=2 * width, activation=nn.Hardswish),
        )
        self.features = convolution(2 * width, width, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2 * width, width, 1, bias=False), nn.Sigmoid())
        self.low_classifier, self.high_classifier = nn.Conv2d(width, classes, 1), nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        high = self.high(low)
        y = self.features(high) * self.scale(high)
        y = interpolate(y, size=low.shape[-2:], mode="bilinear", align_corners=False)
        y = self.low_classifier(low) + self.high_classifier(y)
        return interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with batch normalization and transposed convolutions. Input [batch, 3, H, W]."""

    def __init__(self, width: int = 8, stages: int = 3, classes: int = 4):
        super().__init__()
        widths = [width << stage for stage in range(stages)]
        self.down = nn.ModuleList(self.stage(before, after) for before, after in zip([3, *widths], widths, strict=False))
        narrower = widths[-2::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * channels, channels, 2, 2) for channels in narrower)
        self.joined = nn.ModuleList(self.stage(2 * channels, channels) for channels in narrower)
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    @staticmethod
    def stage(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(convolution(channels_in, channels_out), convolution(channels_out, channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = []
        for index, stage in enumerate(self.down):
            x = stage(self.pool(x) if index else x)
            maps.append(x)
        for up, joined, skipped in zip(self.up, self.joined, reversed(maps[:-1]), strict=True):
            x = joined(torch.cat([skipped, up(x)], 1))
        return self.head(x)
