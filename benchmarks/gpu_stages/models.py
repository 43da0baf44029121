"""What a campaign trains: ResNet, BERT and GPT-2, in the sizes that are timed and in tiny ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import burnish
import torch_models
from architectures import text
from burnish.program import Program

Feeds = dict[str, np.ndarray]
SGD = {"name": "sgd", "lr": 0.001, "momentum": 0.9}
QUICK_SGD = {"name": "sgd", "lr": 0.02, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
# Batches differ, so that a contender that trains on something else is found out.
BATCHES = 3


@dataclass(frozen=True, eq=False)
class Model:
    """A network, what it is fed and how it is trained; equal to itself alone.

    Attributes:
        title: in the table.
        build: makes the module from PyTorch's random state.
        sample: extents of one sample: channels, height and width of an image, or the number of tokens.
        classes: that a label is one of.
        optimizer: ``name`` and settings, with names that PyTorch and burnish share.
        vocabulary: number of tokens; None for images and vectors, float32.
        labels_tokens: whether every token has a label of its own; the module returns [batch, tokens, classes] then.
    """

    title: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    classes: int
    optimizer: Mapping[str, Any]
    vocabulary: int | None = None
    labels_tokens: bool = False

    @property
    def images(self) -> bool:
        return len(self.sample) == 3

    @property
    def loss_name(self) -> str:
        return "cross_entropy:class_axis=-1" if self.labels_tokens else "cross_entropy"

    def module(self) -> nn.Module:
        """The module in training mode, always with the same weights."""
        torch.manual_seed(0)
        return self.build().train()

    def batches(self, batch: int) -> list[Feeds]:
        """A few batches: ``x`` and ``labels``."""
        random = np.random.default_rng(0)
        return [self._feeds(batch, random) for _ in range(BATCHES)]

    def _feeds(self, batch: int, random: np.random.Generator) -> Feeds:
        shape = (batch, *self.sample)
        if self.vocabulary is None:
            x = random.standard_normal(shape, dtype=np.float32)
        else:
            x = random.integers(0, self.vocabulary, shape)
        return {"x": x, "labels": random.integers(0, self.classes, shape if self.labels_tokens else batch)}

    def loss(self, module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss as PyTorch computes it, over rows of classes."""
        return nn.functional.cross_entropy(module(x).flatten(0, -2), labels.flatten())

    def torch_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """PyTorch's optimizer, all parameters in one kernel."""
        settings = dict(self.optimizer)
        return OPTIMIZERS[settings.pop("name")](module.parameters(), **settings, fused=True)


class TokenPredictor(nn.Module):
    """GPT-2 (Radford et al. 2019) that returns [batch, tokens, vocabulary], without the transposition of ``text.Gpt2``."""

    def __init__(self, **sizes: int):
        super().__init__()
        self.model = text.Gpt2("sdpa", **sizes)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.rows(x)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015), its stem for small images; residual branches start at zero, as in ``torch_models.ResNet``.

    The input is [batch, 3, height, width].
    """

    def __init__(self, depths: tuple[int, ...] = (2, 2, 2, 2), width: int = 64, classes: int = 10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(torch_models.BasicBlock(channels, width << stage, 2 if block == 0 and stage > 0 else 1))
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, torch_models.BasicBlock):
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(y.mean((2, 3)))


BERT_VOCABULARY, GPT2_VOCABULARY, TINY_VOCABULARY = 30522, 50257, 96


def _bert(title: str, tokens: int, vocabulary: int, optimizer: Mapping[str, Any], **sizes: int) -> Model:
    build = partial(torch_models.Bert, vocabulary=vocabulary, **sizes)
    return Model(title, build, (tokens,), 2, optimizer, vocabulary)


def _gpt2(title: str, tokens: int, vocabulary: int, **sizes: int) -> Model:
    build = partial(TokenPredictor, vocabulary=vocabulary, positions=tokens, **sizes)
    return Model(title, build, (tokens,), vocabulary, ADAMW, vocabulary, labels_tokens=True)


RESNET50 = Model("ResNet-50", torch_models.resnet50, (3, 224, 224), 1000, SGD)
BERT_BASE = _bert("BERT-base", 128, BERT_VOCABULARY, ADAMW)
GPT2_SMALL = _gpt2("GPT-2 small", 1024, GPT2_VOCABULARY, width=768, heads=12, layers=12)
RESNET18 = Model("ResNet-18", ResNet18, (3, 32, 32), 10, QUICK_SGD)
BERT_2 = _bert("BERT of 2 layers", 64, 1000, QUICK_SGD, layers=2, width=256, heads=4)
PERCEPTRON = Model("perceptron", torch_models.mlp, (784,), 10, QUICK_SGD)
DIGITS = Model("digits ResNet", torch_models.DigitsResNet, (1, 8, 8), 10, QUICK_SGD)

_TINY_SIZES = {"layers": 1, "width": 16, "heads": 2}
TINY = {
    "ResNet-50": Model("ResNet-50", partial(torch_models.ResNet, (1,), 4, 10), (3, 16, 16), 10, SGD),
    "BERT-base": _bert("BERT-base", 6, TINY_VOCABULARY, ADAMW, **_TINY_SIZES),
    "GPT-2 small": _gpt2("GPT-2 small", 6, TINY_VOCABULARY, **_TINY_SIZES),
    "ResNet-18": Model("ResNet-18", partial(ResNet18, (1, 1), 4), (3, 8, 8), 10, QUICK_SGD),
    "BERT of 2 layers": _bert("BERT of 2 layers", 6, TINY_VOCABULARY, QUICK_SGD, layers=2, width=16, heads=2),
    "perceptron": Model("perceptron", partial(torch_models.mlp, 12, 8), (12,), 10, QUICK_SGD),
    "digits ResNet": Model("digits ResNet", torch_models.DigitsResNet, (1, 8, 8), 10, QUICK_SGD),
}


def sized(model: Model, tiny: bool) -> Model:
    """The model, or what stands for it in tiny sizes."""
    return TINY[model.title] if tiny else model


@functools.lru_cache(maxsize=2)
def exported(model: Model) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The ONNX model, its batch open, and the initializers that train."""
    module = model.module()
    proto = torch_models.export_onnx(module, torch.from_numpy(model.batches(2)[0]["x"]))
    # Parameters are known by their values, and running statistics begin with those of scales and biases.
    return proto, tuple(name for name in torch_models.parameters_of(module, proto) if "running_" not in name)


@functools.lru_cache(maxsize=2)
def program_of(model: Model, precision: str = "float32") -> Program:
    """The model's training program, which contenders share."""
    proto, trainable = exported(model)
    settings = dict(model.optimizer)
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)
    return burnish.compile(
        proto, loss=model.loss_name, optimizer=optimizer, trainable=list(trainable), metrics=(), precision=precision
    )
