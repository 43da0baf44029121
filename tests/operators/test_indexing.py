"""GatherGrad against sums written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.semantic_operators import run_semantic_operator


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3)])
def test_gather_gradient_adds_every_slice_to_the_one_it_was_read_from(dtype: str, axis: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    data = np.zeros((3, 4, 5), dtype)
    size = data.shape[axis]
    indices = np.asarray(rng.integers(-size, size, shape), dtype=np.int64)
    dy = rng.standard_normal(np.take(data, indices, axis=axis).shape).astype(dtype)
    expected = np.zeros(data.shape)
    flat = np.moveaxis(dy.reshape(*data.shape[: axis % 3], indices.size, *data.shape[axis % 3 + 1 :]), axis % 3, 0)
    np.add.at(np.moveaxis(expected, axis, 0), indices.reshape(-1), flat)
    (actual,) = run_semantic_operator("GatherGrad", [dy, indices, data], like=2, axis=axis)
    assert actual.dtype == np.dtype(dtype)
    np.testing.assert_allclose(actual, expected, rtol=1e-6 if dtype == "float32" else 1e-14, atol=1e-6)


@pytest.mark.slow
def test_repeated_indices_lose_nothing_on_several_threads() -> None:
    """ONNX Runtime's ScatterND adds to one row from several threads at once and loses updates; what is emitted must not."""
    rng = np.random.default_rng(6)
    indices = rng.integers(0, 10, (8, 2500))
    dy = np.ones((8, 2500, 16), np.float32)
    expected = np.bincount(indices.reshape(-1), minlength=10)[:, None] * np.ones(16, np.float32)
    for actual in run_semantic_operator(
        "GatherGrad", [dy, indices, np.zeros((10, 16), np.float32)], like=2, batched=(0, 1), threads=4, runs=20, axis=0
    ):
        np.testing.assert_array_equal(actual, expected)


def test_gather_gradient_of_no_indices_is_zero() -> None:
    dy, indices, data = np.zeros((0, 3), np.float32), np.zeros(0, np.int64), np.ones((4, 3), np.float32)
    (actual,) = run_semantic_operator("GatherGrad", [dy, indices, data], like=2, batched=(0, 1), axis=0)
    np.testing.assert_array_equal(actual, np.zeros((4, 3)))
