"""Classifiers of images and of video: the MNIST network, ViT, Swin, a residual network over frames, and an LSTM over them."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import log_softmax, max_pool2d, normalize, relu

from architectures.attention import Style, attend, join_heads


class Mnist(nn.Module):
    """The network of PyTorch's MNIST example; ``dropout`` scales the rates of its two dropouts."""

    def __init__(self, dropout: float = 1.0):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25 * dropout), nn.Dropout(0.5 * dropout)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = max_pool2d(relu(self.conv2(relu(self.conv1(x)))), 2)
        x = relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Block(nn.Module):
    """A layer of ViT: layer normalization before attention and before the feed-forward network."""

    def __init__(self, width: int, heads: int, style: Style):
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.style = heads, style

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.first_norm(x)).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        x = x + self.output(join_heads(attend(query, key, value, self.style)))
        return x + self.mlp(self.second_norm(x))


class Vit(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2020). Input [batch, 3, pixels, pixels]."""

    def __init__(
        self,
        style: Style,
        pixels: int = 32,
        patch: int = 8,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        classes: int = 5,
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.label = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, style) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.label.expand(x.shape[0], -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def windows_of(x: torch.Tensor, window: int) -> torch.Tensor:
    """[batch, height, width, channels] -> [batch · windows, window², channels]."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // window, window, width // window, window, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, channels)


def relative_index(window: int) -> torch.Tensor:
    """The row of the table of relative positions for each pair of places in a window."""
    places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
    rows, columns = places[:, :, None] - places[:, None, :] + window - 1
    return (rows * (2 * window - 1) + columns).flatten()


def shift_mask(side: int, window: int, shift: int) -> torch.Tensor:
    """-100 for pairs that the shift brought into one window from opposite sides, [windows, window², window²]."""
    region = torch.zeros(1, side, side, 1)
    bounds = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for row, rows in enumerate(bounds):
        for column, columns in enumerate(bounds):
            region[:, rows, columns] = 3 * row + column
    regions = windows_of(region, window).squeeze(2)
    return torch.where(regions[:, :, None] != regions[:, None, :], -100.0, 0.0)


class SwinBlock(nn.Module):
    """Attention in windows, shifted in every other block (Liu et al. 2021), or by cosines (version 2, Liu et al. 2022)."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int, version: int, style: Style):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.side, self.window, self.shift, self.version, self.style = heads, side, window, shift, version, style
        self.register_buffer("index", relative_index(window))
        if shift:
            self.register_buffer("mask", shift_mask(side, window, shift))
        if version == 1:
            self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        else:
            self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
            self.position_mlp = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, heads, bias=False))
            steps = torch.arange(1 - window, window) / (window - 1) * 8
            steps = steps.sign() * torch.log2(steps.abs() + 1) / math.log2(8)
            self.register_buffer("offsets", torch.cartesian_prod(steps, steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, side, side, width] -> the same."""
        if self.version == 1:
            x = x + self.in_windows(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = x + self.norm1(self.in_windows(x))
        return x + self.norm2(self.mlp(x))

    def in_windows(self, x: torch.Tensor) -> torch.Tensor:
        batch, side, _, width = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = windows_of(x, self.window)
        qkv = self.qkv(x).reshape(-1, self.window**2, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        scale = None
        if self.version == 2:
            query = normalize(query, dim=-1) * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
            key, scale = normalize(key, dim=-1), 1.0
        y = self.proj(join_heads(attend(query, key, value, self.style, bias=self.bias(batch), scale=scale)))
        count = side // self.window
        y = y.view(batch, count, count, self.window, self.window, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch, side, side, width)
        return torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y

    def bias(self, batch: int) -> torch.Tensor:
        places = self.window**2
        table = self.table if self.version == 1 else 16 * torch.sigmoid(self.position_mlp(self.offsets))
        bias = table[self.index].view(places, places, self.heads).permute(2, 0, 1)[None]
        if not self.shift:
            return bias
        return (bias + self.mask[:, None]).repeat(batch, 1, 1, 1)


class PatchMerging(nn.Module):
    """Four neighbours become one place of twice the width; version 1 normalizes before the projection, version 2 after it."""

    def __init__(self, width: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width if version == 1 else 2 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.version = version

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], -1)
        return self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))


class Swin(nn.Module):
    """Swin transformer, version 1 or 2: two stages of two blocks. Input [batch, 3, pixels, pixels]."""

    def __init__(self, style: Style, version: int, pixels: int = 32, window: int = 4, width: int = 16, classes: int = 5):
        super().__init__()
        side = pixels // 4
        self.patches, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        layers: list[nn.Module] = []
        for stage in range(2):
            shift = window // 2 if side > window else 0
            layers += [SwinBlock(width, 2 << stage, side, window, moved, version, style) for moved in (0, shift)]
            if not stage:
                layers.append(PatchMerging(width, version))
                side, width = side // 2, 2 * width
        self.layers = nn.Sequential(*layers)
        self.last_norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last_norm(self.layers(self.norm(self.patches(x).permute(0, 2, 3, 1))))
        return self.head(x.mean((1, 2)))


class VideoBlock(nn.Module):
    """Two convolutions over time and space with batch normalization, and a shortcut (Tran et al. 2018)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv3d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm3d(channels_out), nn.BatchNorm3d(channels_out)
        self.conv2 = nn.Conv3d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv3d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm3d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class VideoResNet(nn.Module):
    """R3D (Tran et al. 2018): stages of as many blocks each, of which all but the first double the width and halve the map.

    Input [batch, 3, frames, pixels, pixels].
    """

    def __init__(self, width: int = 8, classes: int = 5, stages: int = 2, blocks: int = 1):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, width, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(width), nn.ReLU()
        )
        layers, channels = [], width
        for stage in range(stages):
            for index in range(blocks):
                layers.append(VideoBlock(channels, width << stage, 2 if stage and not index else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*layers)
        self.pool, self.head = nn.AdaptiveAvgPool3d(1), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class FramesThenLstm(nn.Module):
    """A convolutional network for each frame, an LSTM over their features (Donahue et al. 2015).

    Input [batch, frames, 3, pixels, pixels]; the class is read off the last frame.
    """

    def __init__(self, width: int = 8, hidden: int = 12, classes: int = 5):
        super().__init__()
        self.frames = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.lstm = nn.LSTM(2 * width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, frames = x.shape[:2]
        features = self.frames(x.reshape(batch * frames, *x.shape[2:])).view(batch, frames, -1)
        return self.head(self.lstm(features)[0][:, -1])


class Recurrent(nn.Module):
    """An LSTM or a GRU over embedded tokens; the class is read off the last. Input [batch, tokens], int64."""

    def __init__(
        self,
        kind: str,
        vocabulary: int = 640,
        width: int = 16,
        hidden: int = 12,
        classes: int = 5,
        bidirectional: bool = True,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layer = getattr(nn, kind)(width, hidden, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear((1 + bidirectional) * hidden, classes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.tokens(input_ids))[0][:, -1])
