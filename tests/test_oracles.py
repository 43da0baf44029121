"""What the tests measure with, itself held against what it promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from oracles.central_differences import central_differences, directional_problem
from oracles.combinations import covering, diagonal, named, spread


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


def commands_of(decorator: pytest.MarkDecorator) -> dict[tuple, str]:
    """The first command that runs each row of a parametrization."""
    named_marks = {row.values: {mark.name for mark in row.marks} for row in decorator.args[1]}
    return {
        values: "campaign" if "campaign" in marks else "all" if "slow" in marks else "test"
        for values, marks in named_marks.items()
    }


def test_cases_are_spread_evenly_over_the_commands() -> None:
    commands = commands_of(spread("number", range(13), test=2, test_all=5))
    assert {number for (number,), command in commands.items() if command == "test"} == {0, 12}
    assert {number for (number,), command in commands.items() if command == "all"} == {3, 6, 9}
    assert set(commands_of(spread("number", range(3), test=9)).values()) == {"test"}


def test_marks_of_cases_stay() -> None:
    rows = [pytest.param((1, 2), marks=pytest.mark.slow), (3, 4), (5, 6)]
    assert commands_of(spread("pair", rows, test_all=2)) == {((1, 2),): "all", ((3, 4),): "campaign", ((5, 6),): "test"}
    assert commands_of(spread(("a", "b"), rows[1:], test=1)) == {(3, 4): "test", (5, 6): "all"}


def test_every_value_stands_in_the_diagonal_and_every_row_in_the_product() -> None:
    axes = ("abc", [1, 2], [(0, 0), (0, 1), (1, 0), (1, 1)])
    decorator = diagonal(("letter", axes[0]), ("number", axes[1]), ("x, y", named(axes[2], str)), test=2)
    assert decorator.args[0] == ["letter", "number", "x", "y"]
    commands = commands_of(decorator)
    assert set(commands) == {(letter, number, *pair) for letter, number, pair in itertools.product(*axes)}
    shown = [row for row, command in commands.items() if command != "campaign"]
    assert len(shown) == 4
    assert [{row[0] for row in shown}, {row[1] for row in shown}, {row[2:] for row in shown}] == [set(axis) for axis in axes]
    assert sum(command == "test" for command in commands.values()) == 2
    assert decorator.args[1][1].id == "b-2-(0, 1)"


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
