"""The cheapest assignment of rows to columns, beside SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from burnish.operators.linear_assignment import LINEAR_ASSIGNMENT
from oracles.small_graphs import SmallGraph


def assigned(cost: np.ndarray, counts: np.ndarray, *, reference: bool = False, open_shape: bool = True) -> np.ndarray:
    shape = ("batch", "objects", cost.shape[2]) if open_shape else cost.shape
    graph = SmallGraph({"cost": (str(cost.dtype), shape), "counts": ("bool", shape[:2])})
    graph.output("row", LINEAR_ASSIGNMENT(graph["cost"], graph["counts"]))
    graph.check()
    return (graph.run_reference if reference else graph.run)(cost=cost, counts=counts)["row"]


def check(cost: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> None:
    """The costs are random, so that the cheapest assignment is the only one."""
    assert rows.dtype == np.int64
    for sample in range(len(cost)):
        own = np.flatnonzero(counts[sample])
        expected = np.full(cost.shape[2], -1)
        places, columns = linear_sum_assignment(cost[sample][own])
        expected[columns] = own[places]
        np.testing.assert_array_equal(rows[sample], expected)


@pytest.mark.parametrize(("objects", "columns"), [(1, 1), (3, 7), (6, 6), (9, 5), (12, 30)])
def test_the_assignment_is_the_cheapest(objects: int, columns: int) -> None:
    rng = np.random.default_rng(objects)
    cost = rng.normal(size=(40, objects, columns)) * 5
    counts = rng.random((40, objects)) < 0.8
    counts[0] = False
    counts[1] = True
    check(cost, counts, assigned(cost, counts))
    check(cost, counts, assigned(cost.astype(np.float32), counts, open_shape=False))


def test_rows_that_compete_for_one_column_take_the_long_way() -> None:
    """Each row is cheapest where the one before it is: every search goes over all columns that are taken."""
    cost = np.add.outer(np.arange(6.0), np.arange(7.0))[None] ** 2 + np.random.default_rng(0).random((1, 6, 7)) / 10
    counts = np.ones((1, 6), bool)
    check(cost, counts, assigned(cost, counts))


def test_on_the_reference_evaluator() -> None:
    rng = np.random.default_rng(2)
    cost, counts = rng.normal(size=(3, 4, 5)), rng.random((3, 4)) < 0.7
    check(cost, counts, assigned(cost, counts, reference=True))


def test_costs_that_are_no_numbers_end_all_the_same() -> None:
    cost = np.full((2, 3, 4), np.nan)
    assert assigned(cost, np.ones((2, 3), bool)).shape == (2, 4)
