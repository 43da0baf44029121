"""PyTorch's operators and modules with the samples of its own tests: burnish computes what PyTorch does, or refuses by name."""

from __future__ import annotations

from collections import Counter

import pytest

from oracles.combinations import spread
from oracles.operator_database import NETWORKS, OPERATORS, WAYS, Outcome, module_samples, operator_samples, outcome

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

SAMPLES = 5


def outcomes_of_operator(name: str, count: int | None) -> list[Outcome]:
    return [outcome(*sample, way) for sample in operator_samples(name, count) for way in WAYS]


def check(outcomes: list[Outcome]) -> None:
    assert [found.why for found in outcomes if found.kind == "wrong"] == []
    assert [found.why for found in outcomes if found.why.startswith("bare")] == []


@spread("name", OPERATORS, test=4, test_all=20)
def test_an_operator_is_computed_as_by_pytorch_or_refused(name):
    check(outcomes_of_operator(name, 1))


@pytest.mark.slow
@spread("name", NETWORKS, test_all=4)
def test_a_module_is_computed_as_by_pytorch_or_refused(name):
    check([outcome(*sample, way) for sample in module_samples(name, SAMPLES) for way in WAYS])


@pytest.mark.campaign
@pytest.mark.parametrize("count", [SAMPLES, None])
def test_samples_of_all_operators(count):
    """Prints how many are right, refused and wrong: the figures of an issue's closing note."""
    found: Counter[str] = Counter()
    wrong = []
    for name in OPERATORS:
        for each in outcomes_of_operator(name, count):
            found[each.kind] += 1
            wrong += [f"{name}: {each.why}"] if each.kind == "wrong" else []
    print(dict(found))
    assert wrong == []
