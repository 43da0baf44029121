"""What a program predicts beside its file: rounding is no difference, however much a file makes of it, and all else is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import burnish
from burnish.training.objective import OF_INTEGERS, TOLERANCE, compare_with_file

WEIGHTS = "<float[4, 3] w = {1, -2, 3, 4, 5, -6, 7, 8, 9, 1, 2, -3}"
PLAIN = WEIGHTS + "> { y = MatMul (x, w) }"
NEAR_ZERO = WEIGHTS + ", float low = {-30}> { m = MatMul (x, w) l = Sub (m, m) z = Add (l, low) y = Sigmoid (z) }"
SENSITIVE = WEIGHTS + ", float times = {1000}> { m = MatMul (x, w) t = Mul (m, times) y = Sin (t) }"
ROUNDED = WEIGHTS + (
    ", float step = {0.25}, uint8 zero = {128}> { m = MatMul (x, w) q = QuantizeLinear (m, step, zero)"
    " y = DequantizeLinear (q, step, zero) }"
)
DRAWN = WEIGHTS + "> { m = MatMul (x, w) r = RandomNormalLike (m) y = Add (m, r) }"

Change = Callable[[np.ndarray], np.ndarray]


def compared(tmp_path: Path, body: str, before: Change = lambda x: x, after: Change = lambda y: y):
    """How a file stands to what it gives itself where its inputs or outputs are changed."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> g (float[n, 4] x) => (float[n, 3] y) {body}')
    file = tmp_path / "file.onnx"
    onnx.save(proto, file)
    runtime = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def predict(samples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": after(runtime.run(None, {"x": before(samples["x"])})[0])}

    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    return compare_with_file(file, burnish.compile(file, loss="mse"), predict, {"x": x})


def last_bits(x: np.ndarray) -> np.ndarray:
    return x * np.float32(1 + 2.0**-20)


@pytest.mark.parametrize(
    ("body", "before", "after", "least"),
    [
        (PLAIN, last_bits, np.copy, 0),
        (SENSITIVE, last_bits, np.copy, TOLERANCE),
        (ROUNDED, np.copy, lambda y: y + np.float32(0.25) * (np.arange(y.size).reshape(y.shape) == 1), OF_INTEGERS),
        (NEAR_ZERO, np.copy, lambda y: y + np.float32(5e-8), 0),
        (DRAWN, np.copy, np.copy, 0),
    ],
)
def test_rounding_is_no_difference(tmp_path: Path, body: str, before: Change, after: Change, least: float) -> None:
    """Not even where it comes to more than ``least`` parts of the largest number."""
    found = compared(tmp_path, body, before, after)
    assert found.agrees
    assert found.apart >= least
    assert "predict computes what" in found.message(tmp_path)


@pytest.mark.parametrize(
    ("body", "after", "least"),
    [
        (PLAIN, lambda y: y * np.float32(1.001), TOLERANCE),
        (SENSITIVE, lambda y: y * np.float32(1.5), TOLERANCE),
        (ROUNDED, lambda y: y * np.float32(1.3), OF_INTEGERS),
        (NEAR_ZERO, lambda y: y + np.float32(1e-5), TOLERANCE),
    ],
)
def test_anything_else_is_one(tmp_path: Path, body: str, after: Change, least: float) -> None:
    found = compared(tmp_path, body, after=after)
    assert found.tolerance >= least
    assert not found.agrees
    assert "'y' is off by" in found.message(tmp_path)
    assert "no reason is known" in found.message(tmp_path)
