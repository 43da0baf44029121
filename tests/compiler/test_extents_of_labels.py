"""Labels whose extents no input has: what a convolution leaves of an open length is known to the graph alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish.errors import EngineError
from oracles.several_workers import largest_difference, train_alone, train_in_threads

WEIGHTS = ", ".join(str(number / 9) for number in np.random.default_rng(0).normal(size=36))
TEXT = f"""<ir_version: 8, opset_import: ["": 18]>
g (float[N, 4, T] x) => (float[N, 3, U] y) <float[3, 4, 3] w = {{{WEIGHTS}}}> {{ y = Conv (x, w) }}"""
LOSSES = {"cross_entropy": "labels", "mse": "targets", "bce_with_logits": "targets"}


def program(loss: str) -> burnish.Program:
    return burnish.compile(onnx.parser.parse_model(TEXT), loss=loss, optimizer="sgd:lr=0.1", metrics=())


def batch(loss: str, extent: int, samples: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(samples, 4, 6)).astype(np.float32)
    if LOSSES[loss] == "labels":
        return {"x": x, "labels": rng.integers(0, 3, (samples, extent))}
    return {"x": x, "targets": rng.uniform(size=(samples, 3, extent)).astype(np.float32)}


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
@pytest.mark.parametrize("loss", LOSSES)
def test_labels_of_another_extent_are_refused(loss: str, engine: str) -> None:
    with burnish.Session(program(loss), engine=engine) as session:
        for extent in (1, 3):
            with pytest.raises(EngineError, match=r"failed in the step graph at Reshape "):
                session.step(batch(loss, extent))
        assert np.isfinite(session.step(batch(loss, 4))["loss"])


@pytest.mark.parametrize("loss", LOSSES)
def test_workers(loss: str) -> None:
    batches = [batch(loss, 4, samples=5)] * 2
    alone = train_alone(program(loss), batches)
    for outcome in train_in_threads(program(loss), batches, [[2, 3]] * 2):
        assert largest_difference(outcome, alone) < 1e-6
