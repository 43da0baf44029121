"""What the operator tables cannot say about reductions."""

from __future__ import annotations

import numpy as np

from oracles.gradient_harness import gradient_graph, run_gradients
from specs.operator_spec import OperatorSpec, Sample

MEAN = OperatorSpec("ReduceMean", lambda rng: [])
LOG_SUM_EXP = OperatorSpec("ReduceLogSumExp", lambda rng: [])


def test_mean_over_more_elements_than_float16_can_count() -> None:
    """1/100000 is a float16, 100000 is not."""
    for shapes in ("static", "symbolic"):
        sample = Sample([np.ones((2, 100_000)), np.array([1])])
        _, (gradient,) = run_gradients(
            gradient_graph(MEAN, sample, "float16", shapes), sample, "float16", {0: np.array([[1.0], [-2.0]])}
        )
        np.testing.assert_allclose(gradient[:, 0], [1e-5, -2e-5], rtol=5e-3)


def test_log_sum_exp_of_nothing_but_minus_infinity_has_a_zero_gradient() -> None:
    sample = Sample([np.full((2, 3), -np.inf), np.array([1])])
    cotangent = {0: np.array([[1.5], [-2.0]])}
    _, (gradient,) = run_gradients(gradient_graph(LOG_SUM_EXP, sample, "float32"), sample, "float32", cotangent)
    np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
