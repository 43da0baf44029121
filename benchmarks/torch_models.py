"""PyTorch modules that tests and benchmarks compare with, and their export to ONNX."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import onnx
import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch normalization and a shortcut (He et al. 2015, stride in the 3x3)."""

    def __init__(self, channels_in: int, width: int, stride: int):
        super().__init__()
        channels_out = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    """ResNet of bottlenecks; ``layers=(3, 4, 6, 3)`` and ``width=64`` is ResNet-50.

    Every residual branch starts at zero (Goyal et al. 2017, section 5.1). Beside training better, the gradients of the first
    steps are then well conditioned: with ones instead, PyTorch's own float32 gradients differ from float64's by 2 %.
    """

    def __init__(self, layers: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages = []
        channels = width
        for index, depth in enumerate(layers):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << index, 2 if block == 0 and index > 0 else 1))
                channels = 4 * (width << index)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.stages(y)), 1))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and linear projection (Sandler et al. 2018)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int):
        super().__init__()
        hidden = channels_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [nn.Conv2d(channels_in, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
        ]
        layers += [nn.Conv2d(hidden, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and channels_in == channels_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """MobileNetV2; the default settings are those of the paper without its dropout, so that steps compare exactly."""

    PAPER = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(
        self, settings: tuple[tuple[int, int, int, int], ...] = PAPER, stem: int = 32, head: int = 1280, classes: int = 1000
    ):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, 2, 1, bias=False), nn.BatchNorm2d(stem), nn.ReLU6(inplace=True)]
        channels = stem
        for expansion, channels_out, repeats, stride in settings:
            for index in range(repeats):
                layers.append(InvertedResidual(channels, channels_out, stride if index == 0 else 1, expansion))
                channels = channels_out
        layers += [nn.Conv2d(channels, head, 1, bias=False), nn.BatchNorm2d(head), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(head, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each with a shortcut and layer normalization behind it (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.project(mixed))
        return self.output_norm(x + self.contract(nn.functional.gelu(self.expand(x))))


class Bert(nn.Module):
    """BERT (Devlin et al. 2018) with a classifier on its first token; the default settings are those of BERT-base.

    The input is [batch, tokens], int64; all tokens are of one sentence and none is padding. There is no dropout, so that steps
    compare exactly.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocabulary: int = 30522,
        positions: int = 512,
        classes: int = 2,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.sentences = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, 4 * width) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        y = self.tokens(x) + self.positions(places) + self.sentences(torch.zeros_like(x))
        return self.classifier(torch.tanh(self.pooler(self.layers(self.norm(y))[:, 0])))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization and a shortcut (He et al. 2015)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + shortcut)


class DigitsResNet(nn.Module):
    """The network of ``burnish.models.residual_network`` with its default sizes: three blocks, for images of 8 x 8 pixels."""

    def __init__(self, width: int = 16, classes: int = 10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.blocks = nn.Sequential(
            BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 4 * width, 2)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(y), 1))


def _two_convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [
            nn.Conv2d(channels, channels_out, 3, 1, 1, bias=False),
            nn.InstanceNorm2d(channels_out, affine=True),
            nn.SiLU(),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with instance normalization, SiLU and bilinear upsampling; a class for each pixel.

    Each stage but the last halves height and width; on the way up, maps are doubled and joined with those of the same size.
    """

    def __init__(self, width: int = 16, stages: int = 4, classes: int = 4):
        super().__init__()
        widths = [width << stage for stage in range(stages)]
        self.down = nn.ModuleList(
            _two_convolutions(channels_in, channels) for channels_in, channels in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(_two_convolutions(3 * channels, channels) for channels in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = []
        for index, stage in enumerate(self.down):
            x = stage(self.pool(x) if index else x)
            maps.append(x)
        for stage, skipped in zip(self.up, reversed(maps[:-1]), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = stage(torch.cat([skipped, x], 1))
        return self.head(x)


def mlp(features: int = 784, hidden: int = 128, classes: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def normalized_mlp(features: int = 1024, hidden: int = 1024, depth: int = 4, classes: int = 10) -> nn.Sequential:
    """Hidden layers with batch normalization and ReLU."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Linear(hidden if index else features, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


class AudioNet(nn.Module):
    """A network over raw audio in the manner of M5 (Dai et al. 2016): a kernel of 80 samples with a stride of 4, then three of 9.

    The input is [batch, 1, samples].
    """

    def __init__(self, width: int = 64, classes: int = 35):
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for channels_out, kernel, stride in ((width, 80, 4), (width, 9, 1), (2 * width, 9, 1), (4 * width, 9, 1)):
            layers += [
                nn.Conv1d(channels, channels_out, kernel, stride, (kernel - stride + 1) // 2),
                nn.BatchNorm1d(channels_out),
                nn.ReLU(),
                nn.MaxPool1d(4),
            ]
            channels = channels_out
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layers(x).mean(2))


def _dense(widths: Sequence[int]) -> list[nn.Module]:
    """Dense layers of these widths, the first of which is the input's, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.ReLU()] if layers else []
        layers.append(nn.Linear(inputs, outputs))
    return layers


class Dlrm(nn.Module):
    """A recommendation model of embedding tables and dot products (Naumov et al. 2019), of the form of ``burnish.models.dlrm``.

    The inputs are the numbers of a sample, float32 [batch, numbers], and the row that it looks up in each table, int64
    [batch, tables]; the output is one logit, [batch, 1].
    """

    def __init__(
        self, tables: int = 26, rows: int = 10_000, numbers: int = 13, width: int = 16, hidden: Sequence[int] = (64, 32)
    ):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, width) for _ in range(tables)])
        self.bottom = nn.Sequential(*_dense((numbers, *hidden, width)), nn.ReLU())
        self.top = nn.Sequential(*_dense((width + tables * (tables + 1) // 2, *hidden, 1)))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", first * (tables + 1) + second, persistent=False)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        x = self.bottom(numbers)
        vectors = torch.stack([x, *(table(categories[:, place]) for place, table in enumerate(self.tables))], 1)
        products = torch.matmul(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], 1))


def lenet(classes: int = 10) -> nn.Sequential:
    """LeNet-5 (LeCun et al. 1998) with ReLU and maximum pooling in place of its sigmoids and scaled averages."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), 64, classes)


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    return MobileNetV2(classes=classes)


def export_onnx(
    module: nn.Module,
    example: torch.Tensor | Mapping[str, torch.Tensor],
    training: bool = True,
    opset: int = 17,
    outputs: Sequence[str] = ("logits",),
) -> onnx.ModelProto:
    """Export with the TorchScript exporter, batch symbolic; ``training=True`` keeps BatchNormalization as layers.

    ``example`` is an input ``x``, or several by their names in the order in which the module takes them.
    """
    examples = {"x": example} if isinstance(example, torch.Tensor) else example
    was_training = module.training
    module.train(training)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(examples.values()),
            buffer,
            input_names=list(examples),
            output_names=list(outputs),
            dynamic_axes={name: {0: "batch"} for name in (*examples, *outputs) if name != "loss"},
            opset_version=opset,
            training=torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL,
            do_constant_folding=not training,
            dynamo=False,
        )
    module.load_state_dict(state)
    module.train(was_training)
    model = onnx.load_from_string(buffer.getvalue())
    # Tracing in training mode runs the module, and the exporter writes the running statistics as they are after that.
    for initializer in model.graph.initializer:
        if initializer.name in state and "running" in initializer.name:
            initializer.CopyFrom(onnx.numpy_helper.from_array(state[initializer.name].numpy(), initializer.name))
    return model


def parameters_of(module: nn.Module, model: onnx.ModelProto) -> list[str]:
    """The initializers of an exported model that are the module's parameters.

    The exporter may write a weight under a name of its own, transposed: then its values tell it.
    """
    parameters = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    names = []
    for initializer in model.graph.initializer:
        array = onnx.numpy_helper.to_array(initializer)
        if initializer.name in parameters or any(
            np.array_equal(value, array) or (value.ndim == 2 and np.array_equal(value.T, array)) for value in parameters.values()
        ):
            names.append(initializer.name)
    return names
