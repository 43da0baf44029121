"""Every architecture by name: how it is built, what it is fed, and what it is usually trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from architectures import detection, images, pixels, text
from architectures.attention import Style

TOKENS = 9
SIDE = 32
CLASSES = 5
SCHEDULED = {"every": 2, "gamma": 0.7}
"""Of StepLR."""

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01}
SGD = {"name": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """A network and how it is trained.

    Attributes:
        build: makes the module; takes ``style`` where it has attention.
        inputs: makes a batch of a size, by the names of ``forward``'s arguments in their order.
        labels: makes the labels of a batch, by name; empty where the module computes its loss from its inputs.
        optimizer: ``name`` and settings, with names that PyTorch and burnish share.
        loss: a name of burnish; None where the module computes its loss.
        outputs: names of what the module returns.
        attention: whether ``build`` takes a style.
        scheduled: whether the rate falls by StepLR.
    """

    build: Callable[..., nn.Module]
    inputs: Callable[[int], Tensors]
    labels: Callable[[int], Tensors]
    optimizer: Mapping[str, Any] = field(default_factory=lambda: SGD)
    loss: str | None = "cross_entropy"
    outputs: tuple[str, ...] = ("logits",)
    attention: bool = False
    scheduled: bool = False

    def module(self, style: Style = "eager", **sizes: int) -> nn.Module:
        """A module in training mode, from PyTorch's random state; no two of its vectors are the same."""
        module = self.build(style=style, **sizes) if self.attention else self.build(**sizes)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=float(not name.endswith("bias")), std=0.1)
        return module.train()

    def batch(self, size: int) -> tuple[Tensors, Tensors]:
        """Inputs and labels from PyTorch's random state."""
        return self.inputs(size), self.labels(size)

    def loss_of(self, module: nn.Module, inputs: Tensors, labels: Tensors) -> torch.Tensor:
        """The loss as PyTorch computes it."""
        outputs = module(*inputs.values())
        if self.loss is None:
            return outputs
        function = nn.functional.nll_loss if self.loss == "nll" else nn.functional.cross_entropy
        return function(outputs, labels["labels"])

    def torch_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        settings = dict(self.optimizer)
        return OPTIMIZERS[settings.pop("name")](module.parameters(), **settings)


def tokens_of(length: int = TOKENS, *names: str) -> Callable[[int], Tensors]:
    """Token numbers, [batch, length] for each name."""
    return lambda size: {name: torch.randint(1, text.VOCABULARY, (size, length)) for name in names or ("input_ids",)}


def padded_tokens(length: int = TOKENS) -> Callable[[int], Tensors]:
    """Token numbers and their mask: the last third of every other sample is padding."""

    def inputs(size: int) -> Tensors:
        mask = torch.ones(size, length, dtype=torch.int64)
        mask[1::2, length - length // 3 :] = 0
        return tokens_of(length)(size) | {"attention_mask": mask}

    return inputs


def pairs_of_tokens(length: int = TOKENS) -> Callable[[int], Tensors]:
    """Token numbers of a source and of a target."""
    return tokens_of(length, "input_ids", "decoder_input_ids")


def numbers(*shape: int) -> Callable[[int], Tensors]:
    """``x``, normal numbers, [batch, *shape]."""
    return lambda size: {"x": torch.randn(size, *shape)}


def classes(count: int, *shape: int) -> Callable[[int], Tensors]:
    """``labels``, one of ``count`` classes, [batch, *shape]."""
    return lambda size: {"labels": torch.randint(0, count, (size, *shape))}


def _nothing(_: int) -> Tensors:
    return {}


def yolo_inputs(side: int = SIDE) -> Callable[[int], Tensors]:
    """Images and, for each anchor and each cell of 8 pixels, whether an object stands there, its box and its class."""

    def inputs(size: int) -> Tensors:
        cells = (size, len(detection.ANCHORS), side // 8, side // 8)
        return numbers(3, side, side)(size) | {
            "objects": (torch.rand(cells) < 0.2).float(),
            "boxes": torch.rand(*cells, 4) * 0.5 + 0.1,
            "classes": torch.randint(0, detection.CLASSES, cells),
        }

    return inputs


def ssd_inputs(side: int = SIDE) -> Callable[[int], Tensors]:
    """Images and, for each box over cells of 4 and of 8 pixels, its class, 0 for most, and its offsets."""

    def inputs(size: int) -> Tensors:
        boxes = len(detection.ANCHORS) * ((side // 4) ** 2 + (side // 8) ** 2)
        chosen = torch.randint(1, 1 + detection.CLASSES, (size, boxes)) * (torch.rand(size, boxes) < 0.1)
        return numbers(3, side, side)(size) | {"classes": chosen, "wanted": torch.randn(size, boxes, 4)}

    return inputs


_IMAGES = numbers(3, SIDE, SIDE)
_PIXEL_CLASSES = classes(4, SIDE, SIDE)
_WORDS = classes(text.VOCABULARY, TOKENS)

ARCHITECTURES: Mapping[str, Architecture] = {
    "mnist": Architecture(
        partial(images.Mnist, dropout=0.0),
        numbers(1, 28, 28),
        classes(10),
        {"name": "adadelta", "lr": 1.0},
        "nll",
        scheduled=True,
    ),
    "bert": Architecture(text.Bert, padded_tokens(), classes(CLASSES), ADAMW, attention=True),
    "distilbert": Architecture(partial(text.Bert, sentences=False), padded_tokens(), classes(CLASSES), ADAMW, attention=True),
    "gpt2": Architecture(text.Gpt2, tokens_of(), _WORDS, ADAMW, attention=True),
    "llama": Architecture(text.Llama, tokens_of(), _WORDS, ADAMW, attention=True),
    "t5": Architecture(text.T5, pairs_of_tokens(), _WORDS, {"name": "adafactor", "lr": 0.01}, attention=True),
    "vit": Architecture(images.Vit, _IMAGES, classes(CLASSES), ADAMW, attention=True),
    "swin": Architecture(partial(images.Swin, version=1), _IMAGES, classes(CLASSES), ADAMW, attention=True),
    "swin_v2": Architecture(partial(images.Swin, version=2), _IMAGES, classes(CLASSES), ADAMW, attention=True),
    "deeplab": Architecture(pixels.DeepLab, _IMAGES, _PIXEL_CLASSES),
    "lraspp": Architecture(pixels.LrAspp, _IMAGES, _PIXEL_CLASSES),
    "unet": Architecture(pixels.UNet, _IMAGES, _PIXEL_CLASSES),
    "video_resnet": Architecture(images.VideoResNet, numbers(3, 4, 16, 16), classes(CLASSES)),
    "frames_lstm": Architecture(images.FramesThenLstm, numbers(4, 3, 16, 16), classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "lstm": Architecture(partial(images.Recurrent, "LSTM"), tokens_of(), classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "gru": Architecture(partial(images.Recurrent, "GRU"), tokens_of(), classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "yolo": Architecture(
        lambda: detection.WithLoss(detection.Yolo(), detection.YoloLoss()),
        yolo_inputs(),
        _nothing,
        loss=None,
        outputs=("loss",),
    ),
    "ssd": Architecture(
        lambda: detection.WithLoss(detection.Ssd(), detection.SsdLoss()),
        ssd_inputs(),
        _nothing,
        loss=None,
        outputs=("loss",),
    ),
}
