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


def _tokens(name: str = "input_ids", low: int = 1) -> Callable[[int], Tensors]:
    return lambda size: {name: torch.randint(low, text.VOCABULARY, (size, TOKENS))}


def _padded(size: int) -> Tensors:
    mask = torch.ones(size, TOKENS, dtype=torch.int64)
    mask[1::2, TOKENS - 3 :] = 0
    return _tokens()(size) | {"attention_mask": mask}


def _pair(size: int) -> Tensors:
    return _tokens()(size) | _tokens("decoder_input_ids")(size)


def _numbers(*shape: int) -> Callable[[int], Tensors]:
    return lambda size: {"x": torch.randn(size, *shape)}


def _classes(count: int, *shape: int) -> Callable[[int], Tensors]:
    return lambda size: {"labels": torch.randint(0, count, (size, *shape))}


def _nothing(_: int) -> Tensors:
    return {}


def _yolo_targets(size: int) -> Tensors:
    cells = (size, len(detection.ANCHORS), detection.YOLO_CELLS, detection.YOLO_CELLS)
    return {
        "objects": (torch.rand(cells) < 0.2).float(),
        "boxes": torch.rand(*cells, 4) * 0.5 + 0.1,
        "classes": torch.randint(0, detection.CLASSES, cells),
    }


def _ssd_targets(size: int) -> Tensors:
    boxes = len(detection.ANCHORS) * sum(cells**2 for cells in detection.SSD_CELLS)
    classes = torch.randint(1, 1 + detection.CLASSES, (size, boxes)) * (torch.rand(size, boxes) < 0.1)
    return {"classes": classes, "wanted": torch.randn(size, boxes, 4)}


_IMAGES = _numbers(3, SIDE, SIDE)
_PIXEL_CLASSES = _classes(4, SIDE, SIDE)
_WORDS = _classes(text.VOCABULARY, TOKENS)

ARCHITECTURES: Mapping[str, Architecture] = {
    "mnist": Architecture(
        partial(images.Mnist, dropout=0.0),
        _numbers(1, 28, 28),
        _classes(10),
        {"name": "adadelta", "lr": 1.0},
        "nll",
        scheduled=True,
    ),
    "bert": Architecture(text.Bert, _padded, _classes(CLASSES), ADAMW, attention=True),
    "distilbert": Architecture(partial(text.Bert, sentences=False), _padded, _classes(CLASSES), ADAMW, attention=True),
    "gpt2": Architecture(text.Gpt2, _tokens(), _WORDS, ADAMW, attention=True),
    "llama": Architecture(text.Llama, _tokens(), _WORDS, ADAMW, attention=True),
    "t5": Architecture(text.T5, _pair, _WORDS, {"name": "adafactor", "lr": 0.01}, attention=True),
    "vit": Architecture(images.Vit, _IMAGES, _classes(CLASSES), ADAMW, attention=True),
    "swin": Architecture(partial(images.Swin, version=1), _IMAGES, _classes(CLASSES), ADAMW, attention=True),
    "swin_v2": Architecture(partial(images.Swin, version=2), _IMAGES, _classes(CLASSES), ADAMW, attention=True),
    "deeplab": Architecture(pixels.DeepLab, _IMAGES, _PIXEL_CLASSES),
    "lraspp": Architecture(pixels.LrAspp, _IMAGES, _PIXEL_CLASSES),
    "unet": Architecture(pixels.UNet, _IMAGES, _PIXEL_CLASSES),
    "video_resnet": Architecture(images.VideoResNet, _numbers(3, 4, 16, 16), _classes(CLASSES)),
    "frames_lstm": Architecture(images.FramesThenLstm, _numbers(4, 3, 16, 16), _classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "lstm": Architecture(partial(images.Recurrent, "LSTM"), _tokens(), _classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "gru": Architecture(partial(images.Recurrent, "GRU"), _tokens(), _classes(CLASSES), {"name": "adam", "lr": 1e-3}),
    "yolo": Architecture(
        lambda: detection.WithLoss(detection.Yolo(), detection.YoloLoss()),
        lambda size: _IMAGES(size) | _yolo_targets(size),
        _nothing,
        loss=None,
        outputs=("loss",),
    ),
    "ssd": Architecture(
        lambda: detection.WithLoss(detection.Ssd(), detection.SsdLoss()),
        lambda size: _IMAGES(size) | _ssd_targets(size),
        _nothing,
        loss=None,
        outputs=("loss",),
    ),
}
