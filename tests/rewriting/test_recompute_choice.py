"""How segments are chosen: the fewest bytes of checkpoints, and each plan worked out once."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

import burnish
from burnish.models import residual_network
from burnish.operators import semantic_operators
from burnish.operators.collectives import MARKS
from burnish.rewriting import recompute, recompute_choice
from burnish.rewriting.recompute_choice import Forward, _Cut, _fewest_checkpoint_bytes
from oracles.kernel_graphs import kernel_graphs


def fewest_of_all(cuts: list[_Cut], saved_before: list[int], largest: float) -> int | None:
    """The bytes of the best of all choices of cuts, found by trying each."""
    found = []
    for count in range(len(cuts) + 1):
        for chosen in combinations(range(len(cuts)), count):
            places = [0, *(saved_before[index] for index in chosen), saved_before[-1]]
            if all(behind - before <= largest for before, behind in pairwise(places)):
                found.append(sum(cuts[index].bytes for index in chosen))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(8))
def test_the_cuts_have_the_fewest_bytes_of_all_that_divide_the_saved_ones(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 8))
    cuts = [_Cut(index, (index,), int(size)) for index, size in enumerate(rng.integers(1, 9, count))]
    saved_before = np.cumsum(rng.integers(0, 7, count + 1)).tolist()
    reached = set()
    for parts in (1, 2, 3, 5, 8, 40):
        largest = saved_before[-1] / parts
        chosen = _fewest_checkpoint_bytes(cuts, saved_before, largest)
        expected = fewest_of_all(cuts, saved_before, largest)
        reached.add(expected is None)
        assert (None if chosen is None else sum(cut.bytes for cut in chosen)) == expected
        if chosen is not None:
            places = [0, *(saved_before[cut.position] for cut in chosen), saved_before[-1]]
            assert all(behind - before <= largest for before, behind in pairwise(places))
    assert False in reached


@pytest.mark.slow
def test_planning_orders_the_work_of_a_plan_once_and_measures_values_once(monkeypatch):
    program = burnish.compile(residual_network(width=4, blocks=(1, 1)), optimizer="sgd:lr=0.1", recompute="layers:batch=4")
    calls = {"schedule": 0, "plan": 0, "value_bytes": 0}

    def counted(owner, name):
        original = getattr(owner, name)

        def counting(*arguments, **options):
            calls[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    counted(Forward, "schedule")
    counted(recompute_choice, "plan")
    counted(recompute, "value_bytes")
    kernel_graphs(program, semantic_operators() - MARKS, ("step",))
    assert calls["plan"] > 2
    assert calls["schedule"] == calls["plan"] + 1  # and that of what is taken
    assert calls["value_bytes"] == 1
