"""What ``burnish.grad`` emits for an operator, differentiated again, against differences of the first gradient in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from oracles.operator_cases import CASES, Case, cases_where, in_turn
from oracles.second_gradients import SecondGradients

SINGULAR = {"LpNormalization": "p_2_zero_row"}
"""Samples at a point where the gradient jumps: the direction of a row that is zero."""
REFUSED = {"GridSample": "no_points"}
"""Samples whose second gradient is refused: shapes without elements, which the standard's inference does not take."""


def size(case: Case) -> int:
    return sum(int(np.size(array)) for array in case.sample.inputs if array is not None)


def is_measured(case: Case) -> bool:
    """Whether differences say something: in float64, away from kinks."""
    left_out = case.sample.name in (SINGULAR.get(case.spec.op_type), REFUSED.get(case.spec.op_type))
    return case.widest == "float64" and case.sample.smooth and not left_out


SMALLEST = {id(case.spec): case for case in sorted(CASES.values(), key=size, reverse=True) if is_measured(case)}


def check(case: Case, choose: Callable[[list[str]], list[str]]) -> None:
    """Differentiate those first gradients again that ``choose`` takes."""
    rng = np.random.default_rng(zlib.crc32(f"{case.spec.op_type}-{case.sample.name}".encode()))
    second = SecondGradients.of_case(case, rng)
    if second is None or second.function is None:
        pytest.skip("an output of unknown rank, or nothing that computes the first gradient with all digits of float64")
    for of in choose(second.of):
        assert second.problem(of, rng) == ""


@cases_where(lambda case: case in SMALLEST.values(), test=18, test_all=54)
def test_smallest_sample_twice(case: Case) -> None:
    check(case, lambda gradients: gradients[:1])


@pytest.mark.slow
@cases_where(is_measured, test_all=110)
def test_every_sample_twice(case: Case) -> None:
    check(case, lambda gradients: in_turn(case, gradients[:3]))


@pytest.mark.campaign
@cases_where(is_measured)
def test_several_gradients_of_every_sample_twice(case: Case) -> None:
    check(case, lambda gradients: gradients[:3])
