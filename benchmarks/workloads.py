"""What contenders train: models of one seed, their data and their optimizers, written where processes of any kind read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

import torch_models
from architectures import catalogue, images, published
from architectures.catalogue import ARCHITECTURES, Architecture
from architectures.sizes import SIZED

# Batches differ, so that a contender that trains on something else is found out, and are few, so that all fit in memory.
BATCHES = 3
VOCABULARY = 30522
# Before the name of an architecture of the catalogue.
ARCHITECTURE = "architecture-"


@dataclass(frozen=True)
class Workload:
    """A model, what a sample of it is, and how it is trained.

    Attributes:
        build: makes the module, in training mode, from PyTorch's random state.
        sample: shape of one sample for a size: height and width of an image, or the number of tokens or of samples of audio.
        size: the size where none is asked for.
        batch: the batch size where none is asked for.
        classes: number of classes.
        optimizer: keyword arguments, and ``name``: ``sgd`` or ``adamw``.
        tokens: how many different tokens there are, whose numbers are the samples, int64; 0 for float32 values.
        pixels: whether every pixel of an image has a label of its own.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int], tuple[int, ...]]
    size: int
    batch: int
    classes: int
    optimizer: Mapping[str, Any]
    tokens: int = 0
    pixels: bool = False

    loss_name: ClassVar[str] = "cross_entropy"
    labels: ClassVar[tuple[str, ...]] = ("labels",)
    outputs: ClassVar[tuple[str, ...]] = ("logits",)

    @property
    def images(self) -> bool:
        """Whether samples have the form of images, for which a memory format can be chosen."""
        return len(self.sample(1)) == 3

    def arrays(self, batch: int, size: int | None, random: np.random.Generator) -> dict[str, np.ndarray]:
        """A batch: ``x`` and ``labels``."""
        sample = self.sample(size or self.size)
        if self.tokens:
            x = random.integers(0, self.tokens, (batch, *sample))
        else:
            x = random.standard_normal((batch, *sample), dtype=np.float32)
        return {"x": x, "labels": random.integers(0, self.classes, (batch, *(sample[1:] if self.pixels else ())))}

    def loss(self, module: Callable[..., torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss as PyTorch computes it."""
        return nn.functional.cross_entropy(module(feeds["x"]), feeds["labels"])


@dataclass(frozen=True)
class ArchitectureWorkload:
    """An architecture of the catalogue, with PyTorch's operator of attention where it has any.

    Attributes:
        architecture: what it is fed, its loss and its optimizer.
        batch: the batch size where none is asked for.
    """

    architecture: Architecture
    batch: int
    size: ClassVar[int | None] = None

    @property
    def images(self) -> bool:
        return len(self.architecture.inputs(1).get("x", torch.empty(0)).shape) == 4

    @property
    def optimizer(self) -> Mapping[str, Any]:
        return self.architecture.optimizer

    @property
    def loss_name(self) -> str | None:
        return self.architecture.loss

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.architecture.loss is None else ("labels",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.architecture.outputs

    def build(self) -> nn.Module:
        return self.architecture.module("sdpa")

    def arrays(self, batch: int, size: int | None, random: np.random.Generator) -> dict[str, np.ndarray]:
        """A batch: what the module takes, in its order, and the labels.

        Raises:
            ValueError: a size was asked for.
        """
        if size is not None:
            raise ValueError("architectures have the one size that is in architectures/sizes.py")
        torch.manual_seed(int(random.integers(2**31)))
        inputs, labels = self.architecture.batch(batch)
        return {name: tensor.numpy() for name, tensor in (inputs | labels).items()}

    def loss(self, module: Callable[..., torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss as PyTorch computes it."""
        labels = {name: feeds[name] for name in self.labels}
        return self.architecture.loss_of(module, {name: feeds[name] for name in feeds if name not in labels}, labels)


@dataclass(frozen=True)
class ClicksWorkload:
    """A recommendation model that tells clicks from their absence; the rows that samples look up follow Zipf's law.

    Attributes:
        rows: of each of its embedding tables.
        tables: how many there are.
        batch: the batch size where none is asked for.
    """

    rows: int = 10_000
    tables: int = 26
    batch: int = 128

    size: ClassVar[int | None] = None
    images: ClassVar[bool] = False
    optimizer: ClassVar[Mapping[str, Any]] = {"name": "adagrad", "lr": 0.05}
    loss_name: ClassVar[str] = "bce_with_logits"
    labels: ClassVar[tuple[str, ...]] = ("targets",)
    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    numbers: ClassVar[int] = 13

    def build(self) -> nn.Module:
        return torch_models.Dlrm(self.tables, self.rows, self.numbers)

    def arrays(self, batch: int, size: int | None, random: np.random.Generator) -> dict[str, np.ndarray]:
        """A batch: ``numbers``, ``categories`` and ``targets``; frequent rows stand anywhere in a table.

        Raises:
            ValueError: a size was asked for.
        """
        if size is not None:
            raise ValueError("a recommendation model has no size but that of its tables")
        ranks = random.zipf(1.2, (batch, self.tables)).astype(np.int64)
        return {
            "numbers": random.standard_normal((batch, self.numbers), dtype=np.float32),
            "categories": (ranks * 2654435761) % self.rows,
            "targets": random.integers(0, 2, (batch, 1)).astype(np.float32),
        }

    def loss(self, module: Callable[..., torch.Tensor], feeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss as PyTorch computes it."""
        logits = module(feeds["numbers"], feeds["categories"])
        return nn.functional.binary_cross_entropy_with_logits(logits, feeds["targets"])


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 whose residual branches start at zero, as ``torch_models.ResNet``'s do and for the same reason.

    With ones, the third losses of PyTorch's own two memory formats are 0.4 % apart: nothing could be told from them.
    """
    module = torch_models.mobilenet_v2()
    for block in module.modules():
        if isinstance(block, torch_models.InvertedResidual) and block.residual:
            nn.init.zeros_(block.layers[-1].weight)
    return module


# Rates as high as training allows in small models, so that an update that is wrong shows in the third loss.
QUICK = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
SLOW = {"name": "sgd", "lr": 0.001, "momentum": 0.9}
ADAMW = {"name": "adamw", "lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}

LSTM_TOKENS = 640


def lstm() -> nn.Module:
    """Two layers of an LSTM, 256 wide, over embedded tokens. They read forward: onnxruntime-training knows no other direction."""
    return images.Recurrent("LSTM", vocabulary=LSTM_TOKENS, width=256, hidden=256, bidirectional=False)


def gru() -> nn.Module:
    """The same of a GRU."""
    return images.Recurrent("GRU", vocabulary=LSTM_TOKENS, width=256, hidden=256, bidirectional=False)


GPT2_TOKENS = 128
GPT2 = replace(
    ARCHITECTURES["gpt2"],
    build=lambda style: published.gpt2_small(),
    inputs=lambda size: {"input_ids": torch.randint(0, published.GPT2_VOCABULARY, (size, GPT2_TOKENS))},
    labels=catalogue.classes(published.GPT2_VOCABULARY, GPT2_TOKENS),
    optimizer=ADAMW,
)


def image_network(build: Callable[[], nn.Module], batch: int, optimizer: Mapping[str, Any], classes: int = 1000) -> Workload:
    """A network that was published for images of 224 x 224."""
    return Workload(build, lambda size: (3, size, size), 224, batch, classes, optimizer)


WORKLOADS: Mapping[str, Workload | ArchitectureWorkload | ClicksWorkload] = {
    "mlp": Workload(torch_models.mlp, lambda _: (784,), 1, 32, 10, QUICK),
    "mlp-batchnorm": Workload(torch_models.normalized_mlp, lambda _: (1024,), 1, 256, 10, QUICK),
    "digits-resnet": Workload(torch_models.DigitsResNet, lambda size: (1, size, size), 8, 64, 10, QUICK),
    "lenet": Workload(torch_models.lenet, lambda _: (1, 28, 28), 28, 64, 10, QUICK),
    "resnet50": Workload(torch_models.resnet50, lambda size: (3, size, size), 224, 16, 1000, SLOW),
    "mobilenet_v2": Workload(mobilenet_v2, lambda size: (3, size, size), 224, 16, 1000, SLOW),
    "unet": Workload(torch_models.UNet, lambda size: (3, size, size), 256, 4, 4, QUICK, pixels=True),
    "audio": Workload(torch_models.AudioNet, lambda samples: (1, samples), 16000, 16, 35, QUICK),
    "lstm": Workload(lstm, lambda size: (size,), 64, 16, 5, ADAMW, tokens=LSTM_TOKENS),
    "dlrm": ClicksWorkload(),
    "gru": Workload(gru, lambda size: (size,), 64, 32, 5, ADAMW, tokens=LSTM_TOKENS),
    "efficientnet_b0": image_network(published.efficientnet_b0, 8, SLOW),
    "mobilenet_v3": image_network(published.mobilenet_v3_large, 16, SLOW),
    "densenet121": image_network(published.densenet121, 8, SLOW),
    "deeplab": replace(image_network(published.deeplab_resnet50, 2, SLOW, classes=21), pixels=True),
    "r3d_18": Workload(published.r3d_18, lambda size: (3, 16, size, size), 112, 2, 400, SLOW),
    "convnext_tiny": image_network(published.convnext_tiny, 4, ADAMW),
    "vit_small": image_network(published.vit_small, 8, ADAMW),
    "gpt2": ArchitectureWorkload(GPT2, 4),
    "bert-base": Workload(torch_models.Bert, lambda size: (size,), 128, 8, 2, ADAMW, tokens=VOCABULARY),
    **{ARCHITECTURE + name: ArchitectureWorkload(architecture, batch) for name, (architecture, batch) in SIZED.items()},
}


def prepare(folder: Path, model: str, batch: int, size: int | None = None) -> dict[str, Any]:
    """Write a model, its weights and batches into a folder.

    Returns:
        What every contender's job holds: ``model`` (the name), ``batch``, ``optimizer``, ``loss`` (its name; None where the model
        computes it), ``trainable`` (names of initializers; None for those that a file tells by itself), and paths: ``onnx``,
        ``weights`` (of PyTorch), ``arrays`` (the same as npz), ``data``.
    """
    workload = WORKLOADS[model]
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    module = workload.build()
    batches = [workload.arrays(batch, size, random) for _ in range(BATCHES)]
    np.savez(
        folder / "data.npz", **{f"{name}{index}": array for index, feeds in enumerate(batches) for name, array in feeds.items()}
    )
    torch.save(module.state_dict(), folder / "weights.pt")
    np.savez(folder / "weights.npz", **{name: tensor.numpy() for name, tensor in module.state_dict().items()})
    example = {
        name: torch.from_numpy(array[: min(2, batch)]) for name, array in batches[0].items() if name not in workload.labels
    }
    model_proto = torch_models.export_onnx(module, example, outputs=workload.outputs)
    (folder / "model.onnx").write_bytes(model_proto.SerializeToString())
    trainable = None
    if isinstance(workload, ArchitectureWorkload):
        trainable = torch_models.parameters_of(module, model_proto)
    return {
        "model": model,
        "batch": batch,
        "loss": workload.loss_name,
        "trainable": trainable,
        "onnx": str(folder / "model.onnx"),
        "weights": str(folder / "weights.pt"),
        "arrays": str(folder / "weights.npz"),
        "data": str(folder / "data.npz"),
        "optimizer": dict(workload.optimizer),
    }
