"""Steps of random networks on every engine, with kernels and without: loss, gradients and statistics beside float64."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import burnish
from burnish import engines, losses, optim
from burnish.engines.base import described
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.torch import TorchEngine
from burnish.errors import UntrainedWeightsWarning
from burnish.kernels.compiling import find_compiler
from burnish.kernels.convolution import channels_last
from oracles.random_networks import CLASSES, RandomNetwork, in_float64, random_networks

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
GRADIENT = "opt/momentum/"
"""What the first step leaves there is the gradient itself."""
OWN, BESIDE = 3e-4, 6e-5
"""Rounding relative to an array itself, and to the largest gradient: that before a normalization is nothing but rounding."""


@dataclass(frozen=True)
class Objective:
    """What a network is trained on, and by.

    Attributes:
        loss: over class indices, or over a target for each class.
        largest_norm: that gradients are clipped to together; None clips nothing.
    """

    loss: losses.Loss
    largest_norm: float | None = None

    def batch(self, network: RandomNetwork) -> dict[str, np.ndarray]:
        """The batch of a network, with what the loss compares with."""
        labels = network.batch["labels"]
        if self.loss.name not in OVER_TARGETS and not getattr(self.loss, "probabilities", False):
            return network.batch
        return {"x": network.batch["x"], "targets": (0.7 * np.eye(CLASSES)[labels] + 0.1).astype(np.float32)}


OVER_TARGETS = ("mean_squared_error", "bce_with_logits")
OBJECTIVES = [
    *[Objective(losses.cross_entropy())] * 4,
    Objective(losses.cross_entropy(), largest_norm=0.01),
    Objective(losses.cross_entropy(weight=(0.5, 2.0, 1.0), label_smoothing=0.1)),
    Objective(losses.cross_entropy(ignore_index=2, weight=(0.5, 2.0, 1.0))),
    Objective(losses.cross_entropy(reduction="sum")),
    Objective(losses.cross_entropy(probabilities=True)),
    Objective(losses.focal(gamma=2.0)),
    Objective(losses.mean_squared_error()),
    Objective(losses.bce_with_logits(pos_weight=(1.0, 3.0, 0.5))),
]


def stepped(
    program: burnish.Program, engine: engines.Engine, batch: dict[str, np.ndarray], threads: int
) -> dict[str, np.ndarray]:
    """The loss of a step, what it makes of the state, and the loss of an evaluation after it."""
    with burnish.Session(program, engine, threads=threads) as session:
        loss = session.step(batch)["loss"]
        state = {name: array for name, array in session.state().items() if array.dtype.kind == "f"}
        return {**state, "loss": np.asarray(loss), "evaluation": np.asarray(session.evaluate(batch)["loss"])}


def check(network: RandomNetwork, threads: int, compared: Sequence[engines.Engine], objective: Objective) -> None:
    plain = optim.sgd(lr=0.5, momentum=0.9)
    optimizer = plain if objective.largest_norm is None else optim.chain(optim.clip_by_global_norm(objective.largest_norm), plain)

    def compiled(model) -> burnish.Program:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedWeightsWarning)  # of a value that was drawn and is not read
            return burnish.compile(model, loss=objective.loss, optimizer=optimizer, metrics=())

    batch = objective.batch(network)
    doubled = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in batch.items()}
    exact = stepped(compiled(in_float64(network.model)), TorchEngine(compile="none"), doubled, threads)
    largest = max(np.linalg.norm(array) for name, array in exact.items() if name.startswith(GRADIENT))
    program = compiled(network.model)
    for engine in compared:
        actual = stepped(program, engine, batch, threads)
        assert actual.keys() == exact.keys()
        for name, array in exact.items():
            error = np.linalg.norm(actual[name].astype(np.float64) - array)
            allowed = OWN * np.linalg.norm(array) + BESIDE * largest + 1e-6
            assert error <= allowed, (
                f"{engine.name}, {described(engine)['kernels']}: {name} is off by {error:.1e}, and {allowed:.1e} is rounding"
            )


def check_drawn(count: int, compared: Sequence[engines.Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw networks and check them; convolutions that are too narrow to gain by kernels have them in half of the networks."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=CALM)
    @given(
        random_networks(),
        st.sampled_from((1, channels_last.LEAST_WIDTH)),
        st.sampled_from((1, 2)),
        st.sampled_from(OBJECTIVES),
    )
    def run(network: RandomNetwork, least_width: int, threads: int, objective: Objective) -> None:
        monkeypatch.setattr(channels_last, "LEAST_WIDTH", least_width)
        check(network, threads, compared, objective)

    run()


@pytest.mark.slow
def test_networks_train_alike_with_kernels_and_without(monkeypatch):
    check_drawn(4, [OnnxRuntimeEngine(kernels=True), OnnxRuntimeEngine(kernels=False)], monkeypatch)


@pytest.mark.slow
def test_networks_train_alike_on_all_engines(monkeypatch):
    check_drawn(12, [OnnxRuntimeEngine(kernels=True), TorchEngine()], monkeypatch)


@pytest.mark.campaign
def test_many_networks_train_alike_on_all_engines(monkeypatch):
    check_drawn(150, [OnnxRuntimeEngine(kernels=True), OnnxRuntimeEngine(kernels=False), TorchEngine()], monkeypatch)
