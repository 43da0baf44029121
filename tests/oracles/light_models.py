"""The nine models in the onnx package's ``light`` folder, trained by burnish and by PyTorch from the same weights.

The files have weights by their shapes alone; they are drawn here, so that what passes through the layers keeps its size. Dropout
is off on both sides: masks are drawn in different ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles import torch_interpreter

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = tuple(path.stem.removeprefix("light_") for path in sorted(FOLDER.glob("*.onnx")))
BATCH, STEPS, RATE, MOMENTUM = 8, 5, 3e-4, 0.9
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """What PyTorch computes.

    Attributes:
        losses: of each step.
        gradients: of the first step, by weight.
        state: weights and running statistics after the last step, by name.
    """

    losses: Sequence[float]
    gradients: Arrays
    state: Arrays


class LightModel:
    """A file, its program, the weights that both sides start from, and a batch of eight images.

    Args:
        name: of the file, without ``light_`` and its suffix.
    """

    def __init__(self, name: str):
        self.model = onnx.load(FOLDER / f"light_{name}.onnx")
        for node in self.model.graph.node:
            if node.op_type == "Dropout":
                node.attribute[0].f = 0.0
        rng = np.random.default_rng(0)
        optimizer = burnish.optim.sgd(lr=RATE, momentum=MOMENTUM)
        self.program = burnish.compile(self.model, optimizer=optimizer, metrics=(), batch="open")
        self.state = {key: drawn(key, array, rng) for key, array in self.program.initial_state(seed=0).items()}
        self.batch = {}
        for entry in self.program.signature["step"].inputs:
            shape = [extent if isinstance(extent, int) else BATCH for extent in entry.shape]
            if entry.name == "labels":
                self.batch["labels"] = rng.integers(0, 1000, shape)
            elif not entry.is_state and len(shape) == 4:
                self.image, self.batch[entry.name] = entry.name, rng.standard_normal(shape).astype(np.float32)

    def in_pytorch(self, dtype: torch.dtype, steps: int) -> Trained:
        weights = {
            key.removeprefix("param/"): torch.tensor(array, dtype=dtype, requires_grad=True)
            for key, array in self.state.items()
            if key.startswith("param/")
        }
        statistics = {key.removeprefix("stat/"): torch.tensor(array, dtype=dtype) for key, array in self.statistics.items()}
        inputs = {self.image: torch.tensor(self.batch[self.image], dtype=dtype), **weights}
        labels, last = torch.tensor(self.batch["labels"]), self.model.graph.node[-1]
        logits = last.input[0] if last.op_type == "Softmax" else last.output[0]
        optimizer = torch.optim.SGD(weights.values(), lr=RATE, momentum=MOMENTUM)
        losses, gradients = [], {}
        for _ in range(steps):
            optimizer.zero_grad()
            output = torch_interpreter.run(self.model, inputs, logits, statistics, BATCH)
            loss = torch.nn.functional.cross_entropy(output, labels)
            loss.backward()
            gradients = gradients or {name: weight.grad.double().numpy() for name, weight in weights.items()}
            optimizer.step()
            losses.append(loss.item())
        state = {name: tensor.detach().double().numpy() for name, tensor in (weights | statistics).items()}
        return Trained(losses, {name: array.copy() for name, array in gradients.items()}, state)

    @property
    def statistics(self) -> Arrays:
        return {key: array for key, array in self.state.items() if key.startswith("stat/")}

    @cached_property
    def exact(self) -> Trained:
        """PyTorch's steps in float64."""
        return self.in_pytorch(torch.float64, STEPS)

    @cached_property
    def rounded(self) -> Trained:
        """PyTorch's steps in float32."""
        return self.in_pytorch(torch.float32, STEPS)

    def gradients_on(self, engine: str) -> Arrays:
        """The gradients of the first step in float32, by weight."""
        inputs = self.state | self.batch
        feeds = {entry.name: inputs[entry.name] for entry in self.program.signature["grad"].inputs}
        return _of_weights(burnish.engines.get(engine).run(self.program.grad, feeds))

    def gradients_in_float64(self) -> Arrays:
        """The gradients of the first step in float64, on the PyTorch engine: ONNX Runtime has no such convolutions."""
        inputs = {
            key: array.astype(np.float64) if array.dtype == np.float32 else array
            for key, array in (self.state | self.batch).items()
        }
        feeds = {entry.name: inputs[entry.name] for entry in self.program.signature["grad"].inputs}
        return _of_weights(TorchEngine().load(compute_in_float64(self.program.grad))(feeds))

    def steps_on(self, engine: str) -> tuple[Sequence[float], Arrays]:
        """The losses of five steps, and weights and running statistics after them, by name."""
        with burnish.Session(self.program, engine=engine, state=self.state, seed=0) as session:
            losses = [session.step(self.batch)["loss"] for _ in range(STEPS)]
            state = session.state()
        return losses, {key.partition("/")[2]: array for key, array in state.items() if key.startswith(("param/", "stat/"))}

    def moved(self, state: Arrays) -> Arrays:
        """By how much weights and running statistics are not what they were at the start."""
        start = {key.partition("/")[2]: array for key, array in self.state.items() if key.startswith(("param/", "stat/"))}
        return {name: np.asarray(array, np.float64) - start[name] for name, array in state.items() if name in start}


def loss_errors(actual: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of a loss, over what rounding may make of it: 1e-5 of it, and a part of how far it has fallen.

    In float32 values move across the kinks of ReLU and MaxPool, which changes a gradient, and so a fall, by a percent.
    """
    exact = np.asarray(expected)
    return float(np.max(np.abs(np.subtract(actual, exact)) / (1e-5 * np.abs(exact) + 0.01 * np.abs(exact - exact[0]))))


def drawn(key: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Weights that keep the size of what passes through them, and scales and biases that differ from each other."""
    if not key.startswith("param/"):
        return array
    if array.ndim < 2:
        return (array + 0.1 * rng.standard_normal(array.shape)).astype(array.dtype)
    inputs = array.shape[-2] if array.shape[:2] == (1, 1) else np.prod(array.shape[1:])
    return (rng.standard_normal(array.shape) * np.sqrt(2 / inputs)).astype(array.dtype)


def errors(actual: Arrays, expected: Arrays) -> dict[str, float]:
    """Of each array, the norm of the difference over its norm.

    It is over 1 % of the norm of all for an array that is zero but for rounding, as the gradient of a bias before batch
    normalization is.
    """
    assert actual.keys() == expected.keys()
    whole = np.sqrt(sum(np.sum(np.square(array)) for array in expected.values()))
    sizes = {name: float(np.linalg.norm(array)) for name, array in expected.items()}
    return {
        name: float(np.linalg.norm(np.asarray(actual[name], np.float64) - array))
        / (sizes[name] if sizes[name] > 1e-6 * whole else 1e-2 * whole)
        for name, array in expected.items()
    }


def _of_weights(outputs: Arrays) -> Arrays:
    return {name.removeprefix("grad:"): array for name, array in outputs.items() if name.startswith("grad:")}
