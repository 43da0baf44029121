"""Ranges of activations and scales of weights, beside what they are by definition."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import burnish
from burnish.quantization.calibration import Range, activation_scale, least_divergence, ranges, weight_limits
from burnish.quantization.formats import activation_format, weight_format

MODEL = '<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) {y = Relu (x)}'


def measured(method: str, x: np.ndarray, percentile: float = 99.0) -> dict[str, Range]:
    model = burnish.load(onnx.parser.parse_model(MODEL))
    activations = activation_format("uint8", symmetric=False)
    assert activations is not None
    return ranges(model, ["x", "y"], [{"x": part} for part in np.split(x, 4)], method, percentile, activations, None)


def test_ranges_hold_zero_and_are_those_of_all_batches() -> None:
    x = np.linspace(-3, 5, 400, dtype=np.float32)
    assert measured("minmax", x) == {"x": Range(-3, 5), "y": Range(0, 5)}


def test_a_percentile_leaves_out_the_largest_absolute_values() -> None:
    x = np.linspace(-1, 1, 4000, dtype=np.float32)
    x[7] = 1.5
    limits = measured("percentile", x, 99.0)["x"]
    expected = np.percentile(np.abs(x), 99.0)
    assert limits.low == pytest.approx(-expected, abs=2 * 1.5 / 2048)
    assert limits.high == pytest.approx(expected, abs=2 * 1.5 / 2048)


def test_entropy_cuts_a_long_tail_and_keeps_what_is_even() -> None:
    generator = np.random.default_rng(0)
    even = measured("entropy", generator.uniform(0, 1, 40_000).astype(np.float32))["y"]
    assert even.high == pytest.approx(1, abs=0.06)
    tail = np.concatenate([generator.exponential(1, 39_996), [170, 180, 190, 200]]).astype(np.float32)
    assert measured("entropy", generator.permutation(tail))["y"].high < 60


def test_the_divergence_is_least_where_nothing_is_lost() -> None:
    counts = np.zeros(64, np.int64)
    counts[:10] = 100
    assert least_divergence(counts, 8) <= 12


def test_integers_cover_a_range_with_zero_among_them() -> None:
    for name, lowest in (("uint8", 0), ("int8", -128)):
        activations = activation_format(name, symmetric=False)
        assert activations is not None
        scale, zero = activation_scale(Range(-1.0, 3.0), activations)
        assert scale == pytest.approx(4 / 255)
        assert zero == lowest + 64
        assert activation_scale(Range(0.0, 0.0), activations) == (1.0, lowest)
    symmetric = activation_format("int8", symmetric=True)
    assert symmetric is not None
    assert activation_scale(Range(-1.0, 3.0), symmetric) == (3 / 127, 0)


def test_four_bits_take_the_limits_of_least_squared_error() -> None:
    weight = np.random.default_rng(0).normal(size=(3, 400))
    weight[0, 0] = 30.0
    weight[2] = 0.0
    kind = weight_format("int4 per channel", reduce_range=True)
    limits = weight_limits(weight, 0, kind)

    def error(limit: float, row: np.ndarray) -> float:
        scale = limit / 7
        return float(np.sum((np.clip(np.rint(row / scale), -7, 7) * scale - row) ** 2))

    for row, limit in zip(weight[:2], limits[:2], strict=True):
        assert limit < np.abs(row).max()
        assert error(limit, row) <= min(error(ratio * np.abs(row).max(), row) for ratio in (0.5, 0.7, 0.9, 1.0))
    assert limits[2] > 0
    np.testing.assert_array_equal(weight_limits(weight, None, weight_format("int8", reduce_range=False)), [30.0])
