"""Runs drawn at random on every engine beside PyTorch: tied weights, uneven micro-batches, groups, clipping, averages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import burnish
from burnish import engines
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.torch import TorchEngine
from burnish.kernels.compiling import find_compiler
from oracles.random_runs import PyTorchRun, RandomRun, random_runs

TOLERANCES = {"float64": 3e-8, "float32": 2e-4}
"""Relative to the largest element: the rounding of some updates of a small model. NAdam of PyTorch keeps a product in float32."""


def check(run: RandomRun, engine: engines.Engine, dtype: str, folder: Path) -> None:
    program = burnish.compile(run.model(dtype), loss=run.loss(), optimizer=run.updater(), metrics=(), hold_rows=run.hold_rows())
    beside, updates = PyTorchRun(run), list(run.updates())
    tolerance = TOLERANCES[dtype]
    session = burnish.Session(program, engine, threads=1)
    for at, batches in enumerate(updates):
        for batch in batches:
            loss = session.step(batch)["loss"]
        assert loss == pytest.approx(beside.update(batches), rel=tolerance, abs=tolerance), f"the loss before update {at}"
        if at == 0:
            session.save_checkpoint(folder / "first.safetensors")
    final = session.state()
    for name, parameter in beside.parameters.items():
        assert_close(final[f"param/{name}"], parameter.detach().numpy(), tolerance, name)
    if run.average is not None:
        averaged = float(beside.loss_of(updates[0][0], beside.average))
        loss = session.evaluate(updates[0][0], parameters="average")["loss"]
        assert loss == pytest.approx(averaged, rel=tolerance, abs=tolerance)
    session.close()
    with burnish.Session(program, engine, threads=1) as other:
        other.restore(folder / "first.safetensors")
        for batches in updates[1:]:
            for batch in batches:
                other.step(batch)
        resumed = other.state()
    assert resumed.keys() == final.keys()
    assert all(resumed[name].tobytes() == array.tobytes() for name, array in final.items())


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    error = np.abs(actual - expected).max()
    assert error <= tolerance * max(1.0, np.abs(expected).max()), f"{what} is off by {error:.1e}"


def check_drawn(count: int, compared: Sequence[tuple[engines.Engine, str]], folder: Path) -> None:
    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(random_runs())
    def one(run: RandomRun) -> None:
        for engine, dtype in compared:
            check(run, engine, dtype, folder)

    one()


def test_runs_are_those_of_pytorch(tmp_path):
    check_drawn(4, [(OnnxRuntimeEngine(kernels=False), "float64")], tmp_path)


@pytest.mark.campaign
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")
def test_many_runs_are_those_of_pytorch(tmp_path):
    compared = [
        (OnnxRuntimeEngine(kernels=False), "float64"),
        (OnnxRuntimeEngine(kernels=True), "float32"),
        (TorchEngine(compile="none"), "float64"),
        (TorchEngine(), "float32"),
    ]
    check_drawn(40, compared, tmp_path)
