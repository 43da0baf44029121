"""Every case that the standard brings for an operator of numbers, through ``burnish.grad``, against differences in float64."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from oracles.combinations import spread
from oracles.operator_cases import CASES
from oracles.standard_gradients import STORED_KINDS, Case, compare, node_cases, node_modules, stored_cases

EXPECTED = {
    # A Scan of opset 8.
    "test_scan_sum": "refused",
    # A slope that does not broadcast, which the converter of versions leaves.
    "pytorch-converted:test_PReLU_1d_multiparam": "refused",
    "pytorch-converted:test_PReLU_2d_multiparam": "refused",
    "pytorch-converted:test_PReLU_3d_multiparam": "refused",
}
"""What becomes of single cases that are not right."""

MOST, LARGEST = 8, 4096
"""How many cases of an operator ``make test-all`` runs, of inputs with no more numbers; the campaign runs all."""
IN_THE_TABLES = {case.spec.op_type.lower() for case in CASES.values()}
"""Modules of operators that have samples of their own."""


def expected_status(case: Case) -> str:
    return EXPECTED.get(case.name, "right")


def check(cases: Iterable[Case]) -> int:
    """Assert what becomes of each case; returns how many were compared."""
    findings = [(expected_status(case), compare(case)) for case in cases]
    unlike = [
        f"{finding.case}: {finding.status}, expected {expected}: {finding.detail}"
        for expected, finding in findings
        if finding.status != expected and not (expected == "right" and finding.status in ("random", "unmeasured"))
    ]
    assert unlike == [], "\n".join(unlike)
    return len(findings)


@spread("module", [module for module in node_modules() if module not in IN_THE_TABLES], test=29)
def test_first_case_of_an_operator_without_samples(module: str) -> None:
    cases = node_cases(module)
    single = [case for case in cases if len(case.model.graph.node) == 1]
    check(sorted(single, key=lambda case: case.size)[:1])


@pytest.mark.slow
@pytest.mark.parametrize("module", node_modules())
def test_cases_of_an_operator(module: str) -> None:
    cases = [case for case in node_cases(module) if case.size <= LARGEST]
    check(cases if len(cases) <= MOST else random.Random(module).sample(cases, MOST))


@pytest.mark.campaign
@pytest.mark.parametrize("module", node_modules())
def test_every_case_of_an_operator(module: str) -> None:
    check(node_cases(module))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORED_KINDS)
def test_every_case_of_a_small_model(kind: str) -> None:
    assert check(stored_cases(kind)) > 10
