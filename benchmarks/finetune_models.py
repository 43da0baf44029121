"""The models that ``finetune.py`` tunes, as people find them: modules, and files as their exporters write them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from architectures.images import Vit
from torch_models import MobileNetV2

CLASSES = 5
PIXELS = 32
FEATURES = 64
VOCABULARY, TOKENS = 256, 24
SMALL_MOBILENET = ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 2, 2), (6, 24, 2, 1))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization and a shortcut (He et al. 2015), as ResNet-18 has eight of."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + shortcut)


class ResNet18(nn.Module):
    """ResNet-18 with the names of torchvision's; ``width=64`` is its own."""

    def __init__(self, width: int = 16, classes: int = CLASSES):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        channels = width
        for number in range(4):
            out = width << number
            blocks = BasicBlock(channels, out, 1 if number == 0 else 2), BasicBlock(out, out, 1)
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
            channels = out
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(4):
            x = getattr(self, f"layer{number + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ChannelsLast(nn.Module):
    """A small network of Keras' kind: images [batch, height, width, channels], probabilities out."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for out in (16, 32, 48):
            layers += [nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            channels = out
        self.features, self.dense = nn.Sequential(*layers), nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.features(x.permute(0, 3, 1, 2)).mean((2, 3)))


class Perceptron(nn.Module):
    """As scikit-learn's MLPClassifier: one hidden layer of ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(FEATURES, 48), nn.Linear(48, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(x)))


def tiny_bert() -> nn.Module:
    """BERT of transformers with two layers, without dropout, as a file that was exported for inference has none."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=CLASSES,
        max_position_embeddings=64,  # more than the longest batch is padded to
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class _Logits(nn.Module):
    """What an exporter is given: the logits alone of a model of transformers, or the probabilities of one of Keras' kind."""

    def __init__(self, module: nn.Module, is_text: bool, has_softmax: bool):
        super().__init__()
        self.module, self.is_text, self.has_softmax = module, is_text, has_softmax

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits = self.module(input_ids=inputs[0], attention_mask=inputs[1]) if self.is_text else self.module(*inputs)
        logits = getattr(logits, "logits", logits)
        return torch.softmax(logits, 1) if self.has_softmax else logits


@dataclass(frozen=True)
class Model:
    """A model, and how its file is written.

    Attributes:
        origin: whose files these are like.
        build: makes the module, with new weights.
        head_name: of its last linear layer.
        kind: ``images``, ``table`` or ``text``.
        exporter: ``dynamo``, ``torchscript``, or the name of another in ``EXPORTERS``.
        batch: ``1`` or ``dynamic``.
        channels_first: whether images are [batch, channels, height, width].
        has_softmax: whether the file ends in probabilities.
    """

    origin: str
    build: Callable[[], nn.Module]
    head_name: str
    kind: str = "images"
    exporter: str = "dynamo"
    batch: str = "dynamic"
    channels_first: bool = True
    has_softmax: bool = False

    def head(self, module: nn.Module) -> nn.Linear:
        """The last linear layer."""
        layer = module.get_submodule(self.head_name)
        assert isinstance(layer, nn.Linear)
        return layer

    def logits(self, module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        """The logits of a batch."""
        return _Logits(module, self.kind == "text", has_softmax=False)(*inputs)

    def export(self, module: nn.Module, path: Path) -> None:
        """Write the file, for inference."""
        module.eval()
        if self.exporter in EXPORTERS:
            EXPORTERS[self.exporter](module, path, self.batch)
            return
        wrapped, samples = _Logits(module, self.kind == "text", self.has_softmax), 1 if self.batch == "1" else 2
        wrapped.eval()
        shape = (samples, 3, PIXELS, PIXELS) if self.channels_first else (samples, PIXELS, PIXELS, 3)
        inputs: tuple[torch.Tensor, ...] = (torch.zeros(shape),)
        names = ["x"]
        axes = {0: "batch"} if self.batch == "dynamic" else {}
        if self.kind == "text":
            inputs, names = (torch.ones(samples, TOKENS, dtype=torch.int64),) * 2, ["input_ids", "attention_mask"]
            inputs = (inputs[0], inputs[1].clone())
            axes |= {1: "tokens"}
        stream = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.exporter == "torchscript":
                dynamic = dict.fromkeys(names, axes) if axes else None
                torch.onnx.export(
                    wrapped, inputs, stream, dynamo=False, input_names=names, output_names=["y"], dynamic_axes=dynamic
                )
                path.write_bytes(stream.getvalue())
            else:
                shapes = {"inputs": tuple({axis: torch.export.Dim(name) for axis, name in axes.items()} for _ in names)}
                torch.onnx.export(
                    wrapped, inputs, path, dynamo=True, input_names=names, output_names=["y"],
                    dynamic_shapes=shapes if axes else None, external_data=False, verbose=False,
                )  # fmt: skip


def _as_skl2onnx(module: nn.Module, path: Path, batch: str) -> None:
    """Write a perceptron as skl2onnx writes MLPClassifier: matrix products, labels beside the probabilities."""
    samples = 1 if batch == "1" else None
    arrays = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    initializers = {
        "coefficient": arrays["hidden.weight"].T.copy(),
        "intercepts": arrays["hidden.bias"][None],
        "coefficient1": arrays["output.weight"].T.copy(),
        "intercepts1": arrays["output.bias"][None],
        "classes": np.arange(CLASSES, dtype=np.int64),
    }
    nodes = [
        helper.make_node("MatMul", ["X", "coefficient"], ["mul_result"]),
        helper.make_node("Add", ["mul_result", "intercepts"], ["add_result"]),
        helper.make_node("Relu", ["add_result"], ["next_activations"]),
        helper.make_node("MatMul", ["next_activations", "coefficient1"], ["mul_result1"]),
        helper.make_node("Add", ["mul_result1", "intercepts1"], ["add_result1"]),
        helper.make_node("Softmax", ["add_result1"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["argmax"], axis=1, keepdims=0),
        helper.make_node("Gather", ["classes", "argmax"], ["label"], axis=0),
    ]
    graph = helper.make_graph(
        nodes,
        "MLPClassifier",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [samples, FEATURES])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [samples]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [samples, CLASSES]),
        ],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    onnx.save(helper.make_model(graph, producer_name="skl2onnx", opset_imports=[helper.make_opsetid("", 17)]), path)


EXPORTERS: dict[str, Callable[[nn.Module, Path, str], None]] = {"as skl2onnx": _as_skl2onnx}
"""What writes the files that PyTorch's exporters do not: (module, path, batch), by name."""


def _mobilenet() -> nn.Module:
    return MobileNetV2(SMALL_MOBILENET, stem=8, head=64, classes=CLASSES)


MODELS = {
    "resnet18": Model("as torchvision", ResNet18, "fc"),
    "resnet18-1": Model("as torchvision", ResNet18, "fc", exporter="torchscript", batch="1"),
    "mobilenet": Model("as torchvision", _mobilenet, "classifier", exporter="torchscript"),
    "mobilenet-1": Model("as torchvision", _mobilenet, "classifier", batch="1"),
    "vit": Model("as timm", lambda: Vit("sdpa", PIXELS, 8, 48, 4, 2, CLASSES), "head"),
    "keras": Model("as Keras", ChannelsLast, "dense", exporter="torchscript", channels_first=False, has_softmax=True),
    "bert": Model("transformers", tiny_bert, "classifier", kind="text"),
    "perceptron": Model("as scikit-learn", Perceptron, "output", kind="table", exporter="as skl2onnx"),
}
