"""``batch="open"`` of models that PyTorch's exporters wrote for one sample: what they compute of three is what PyTorch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import burnish
from burnish.engines import registry
from oracles.combinations import diagonal, named


class VisionTransformer(nn.Module):
    """A token for the class is expanded to the batch and put before those of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token, self.positions = (nn.Parameter(torch.randn(1, extent, 8)) for extent in (1, 5))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        return self.head(self.layer(tokens + self.positions)[:, 0])


class Recurrent(nn.Module):
    """Two layers in two directions that begin with a state which is made for the batch, of parameters and of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.state = nn.Parameter(torch.randn(4, 1, 5))
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        states = (self.state.expand(4, count, 5).contiguous(), torch.zeros(4, count, 5))
        return self.head(self.layers(x, states)[0][:, -1])


class Begun(nn.Module):
    """A layer that is given its state: its first axis is of extent 1 too, and is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x, state)[0][:, -1])


class Decoder(nn.Module):
    """A block of GPT-2: views that hold the batch, a mask of the positions, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.normal, self.mixed, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        count, length = words.shape
        x = self.words(words) + self.positions(torch.arange(length))[None]
        parts = self.mixed(self.normal(x)).split(8, 2)
        query, key, value = (part.view(count, length, 2, 4).transpose(1, 2) for part in parts)
        mask = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        scores = (query @ key.transpose(-2, -1) / 2).masked_fill(mask == 0, float("-inf")).softmax(-1)
        mixed = (scores @ value).transpose(1, 2).contiguous().view(count, length, 8)
        return (x + self.out(mixed)) @ self.words.weight.T


class Flattened(nn.Module):
    """A shape that holds the 1 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 4, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolution(x).reshape(x.shape[0], 16))


MODELS = {
    "vision transformer": (VisionTransformer, [((3, 3, 8, 8), 0)]),
    "recurrent": (Recurrent, [((3, 6, 4), 0)]),
    "state given": (Begun, [((3, 6, 4), 0), ((1, 3, 5), 1)]),
    "decoder": (Decoder, [((3, 6), 0)]),
    "flattened": (Flattened, [((3, 1, 4, 4), 0)]),
}


@pytest.mark.filterwarnings("ignore")
@diagonal(
    ("dynamo", named([False, pytest.param(True, marks=pytest.mark.slow)], ["torchscript", "dynamo"])), ("name", MODELS), test=1
)
def test_three_samples_of_a_model_that_was_exported_for_one(name: str, dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    module = make().eval()
    values = [torch.randint(0, 11, shape) if name == "decoder" else torch.randn(shape) for shape, _ in inputs]
    single = tuple(value.narrow(axis, 0, 1) for value, (_, axis) in zip(values, inputs, strict=True))
    names = [f"x{index}" for index in range(len(values))]
    path = tmp_path / "single.onnx"
    torch.onnx.export(module, single, str(path), dynamo=dynamo, opset_version=18, input_names=names, output_names=["y"])
    feeds = {name: value.numpy() for name, value in zip(names, values, strict=True)}
    opened = burnish.load(path, batch="open")
    found = registry.get("onnxruntime").load(opened)(feeds)["y"]
    with torch.no_grad():
        np.testing.assert_allclose(found, module(*values).numpy(), rtol=1e-5, atol=1e-5)
    program = burnish.compile(path, batch="open")
    labels = np.zeros(found.shape[:1] if found.ndim == 2 else (found.shape[0], found.shape[2]), np.int64)
    assert np.isfinite(burnish.Session(program, engine="onnxruntime").step({**feeds, "labels": labels})["loss"])
