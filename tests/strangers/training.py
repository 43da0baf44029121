"""What a stranger expects of his file: it trains, alike on both engines, by its gradient, and comes out as a file that runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import burnish
from burnish.engines.torch import TorchEngine
from burnish.rewriting.change_dtypes import compute_in_float64

ENGINES = ("onnxruntime", "torch")
STEPS = 2
DIFFERENCE = 1e-8
"""The step of a difference in a random direction of length 1, in float64."""
DIRECTIONS = 3
LOSS_TOLERANCE = 1e-5
"""Relative, of the first loss on two engines."""
OUTPUT_TOLERANCE = 1e-4
"""Of an exported file's outputs, relative to the largest: batch normalization has been folded into the weights."""
FALL_TOLERANCE = 0.03
"""By how much of its fall the second loss may differ between engines: rounding moves values of float32 across the kinks of ReLU
and MaxPool, which changes a gradient by a few percent where maps are small."""
GRADIENT_TOLERANCE = 1e-5
"""Relative to the length of the gradient. A central difference by 1e-8 of a loss near 1 has a rounding error near 1e-8 / |g|."""

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """What the checks saw.

    Attributes:
        losses: of each step, on the first engine.
        between_engines: the relative difference of the second loss.
        gradient: the largest difference between the gradient and differences, relative to the gradient's length.
    """

    losses: Sequence[float]
    between_engines: float
    gradient: float


class Failure(Exception):
    """A check that did not hold; the message says which, and by how much."""


def train(source: Path, batch: Batch, **options: Any) -> Trained:
    """Compile a file, train two steps on both engines, check its gradient, export it and run what comes out.

    Args:
        source: the file.
        batch: inputs and labels by name.
        options: of ``burnish.compile``.

    Raises:
        Failure: a check did not hold.
        BurnishError: the file cannot be trained.
    """
    return train_program(burnish.compile(source, optimizer=burnish.optim.sgd(lr=1e-3), metrics=(), **options), batch)


def train_program(program: burnish.Program, batch: Batch, least: float = 1e-30) -> Trained:
    """Do what ``train`` does, with a program; outputs of an export are compared relative to ``least`` at least.

    Raises:
        Failure: a check did not hold.
        BurnishError: the program cannot be run.
    """
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ENGINES:
            with burnish.Session(program, engine=engine, seed=0) as session:
                losses[engine] = [session.step(batch)["loss"] for _ in range(STEPS)]
                tuned = Path(folder, f"{engine}.onnx")
                session.export(tuned)
                _check_export(tuned, session, batch, least)
    first, second = losses.values()
    allowed = LOSS_TOLERANCE * abs(first[0])
    if not (
        abs(first[0] - second[0]) <= allowed and abs(first[1] - second[1]) <= allowed + FALL_TOLERANCE * abs(first[0] - first[1])
    ):
        raise Failure(f"losses differ between engines: {first}, {second}")
    between = abs(first[1] - second[1]) / abs(first[1])
    gradient = _gradient_error(program, batch)
    if not gradient <= GRADIENT_TOLERANCE:
        raise Failure(f"the gradient differs from differences by {gradient:.1e} of its length")
    return Trained(first, between, gradient)


def _check_export(tuned: Path, session: burnish.Session, batch: Batch, least: float) -> None:
    runtime = onnxruntime.InferenceSession(tuned, providers=["CPUExecutionProvider"])
    feeds = {value.name: batch[value.name] for value in runtime.get_inputs()}
    expected = session.predict(feeds)
    for value, result in zip(runtime.get_outputs(), runtime.run(None, feeds), strict=True):
        scale = float(np.max(np.abs(expected[value.name]), initial=least))
        difference = float(np.max(np.abs(result - expected[value.name]), initial=0.0)) / scale
        if not difference <= OUTPUT_TOLERANCE:
            raise Failure(f"the exported file's '{value.name}' differs from predict by {difference:.1e}")


def _gradient_error(program: burnish.Program, batch: Batch) -> float:
    """Compare the loss's slope along random directions with the gradient, in float64.

    Directions hold the weights whose gradient is not zero everywhere. The others are moved one by one: several at once may cross
    a comparison, such as those that an attention mask is made by.
    """
    run = TorchEngine().load(compute_in_float64(program.grad))
    signature = program.signature["grad"]
    state = program.initial_state(seed=0)
    inputs = {entry.name: _widened(state[entry.name]) for entry in signature.inputs if entry.is_state}
    inputs |= {entry.name: _widened(batch[entry.name]) for entry in signature.inputs if entry.name in batch}
    trained = {entry.name.removeprefix("grad:"): entry.name for entry in signature.outputs if entry.name.startswith("grad:")}
    outputs = run(inputs)
    gradients = {f"param/{name}": outputs[output] for name, output in trained.items()}
    length = np.sqrt(sum(np.sum(gradient**2) for gradient in gradients.values()))
    moving = [name for name, gradient in gradients.items() if np.any(gradient)]
    rng = np.random.default_rng(0)
    errors = []
    for names in [moving] * DIRECTIONS + [[name] for name in gradients if name not in moving]:
        direction = {name: rng.standard_normal(gradients[name].shape) for name in names}
        norm = np.sqrt(sum(np.sum(part**2) for part in direction.values()))
        slope = sum(np.sum(gradients[name] * part) for name, part in direction.items()) / norm
        losses = [
            run(inputs | {name: inputs[name] + sign * DIFFERENCE / norm * part for name, part in direction.items()})["loss"]
            for sign in (1, -1)
        ]
        errors.append(abs((losses[0] - losses[1]).item() / (2 * DIFFERENCE) - slope) / length)
    return float(max(errors))


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" else array
