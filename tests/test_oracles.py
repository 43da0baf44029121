"""What the tests measure with, itself held against what it promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oracles.central_differences import central_differences, directional_problem
from oracles.combinations import covering


@pytest.mark.parametrize("together", [1, 2, 3])
def test_rows_of_a_product_hold_every_choice_of_so_many_values(together: int) -> None:
    options = ("abcd", (1, 2, 3), (None, True), (0.5, 1.5), "xy")
    rows = covering(*map(tuple, options), together=together)
    for positions in itertools.combinations(range(len(options)), together):
        met = {tuple(row[position] for position in positions) for row in rows}
        assert met == set(itertools.product(*(options[position] for position in positions)))
    assert len(rows) == len(set(rows)) <= {1: 4, 2: 13, 3: 26}[together]


def test_fewer_options_than_are_to_meet_give_the_whole_product() -> None:
    assert covering((1, 2), "ab") == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def cubes(inputs: list[np.ndarray | None]) -> float:
    (x,) = inputs
    assert x is not None
    return float(np.sum(x**3))


@pytest.mark.parametrize("shape", [(), (1,), (4, 5)])
def test_directions_show_an_error_of_any_element(shape: tuple[int, ...]) -> None:
    x = np.asarray(np.random.default_rng(2).uniform(0.5, 2, shape))
    gradient = np.asarray(3 * x**2)
    np.testing.assert_allclose(central_differences(cubes, [x], 0), gradient, rtol=1e-8)
    assert directional_problem(cubes, [x], 0, gradient, np.random.default_rng(3)) == ""
    for position in np.ndindex(shape):
        wrong = gradient.copy()
        wrong[position] *= 1 + 1e-3
        assert "by the gradient" in directional_problem(cubes, [x], 0, wrong, np.random.default_rng(3))
    assert "has shape" in directional_problem(cubes, [x], 0, gradient[None], np.random.default_rng(3))


def test_a_gradient_that_is_not_finite_is_a_problem() -> None:
    assert directional_problem(cubes, [np.ones(3)], 0, np.full(3, np.nan), np.random.default_rng(3)) != ""
