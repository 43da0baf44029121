"""PyTorch modules that tests and benchmarks compare with, and their export to ONNX."""

from __future__ import annotations

import io
import warnings

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


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), 64, classes)


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    return MobileNetV2(classes=classes)


def export_onnx(module: nn.Module, example: torch.Tensor, training: bool = True, opset: int = 17) -> onnx.ModelProto:
    """Export with the TorchScript exporter, batch symbolic; ``training=True`` keeps BatchNormalization as layers."""
    was_training = module.training
    module.train(training)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            buffer,
            input_names=["x"],
            output_names=["logits"],
            dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
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
