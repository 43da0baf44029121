"""Each graph of a program is lowered when it is first read, and once; nothing else lowers it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.compiler import draft, lowered_graphs
from burnish.models import residual_network
from burnish.targets import Target
from oracles.combinations import diagonal, named
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import train_in_threads
from oracles.standard_operators import STANDARD

AT_ONCE = {"init": 1, "apply": 1, "evaluate": 1, "predict": 1}
"""The small ones, and those that tell what the parameters are for."""


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a graph of each name was lowered to standard operators alone."""
    counts: Counter[str] = Counter()
    lower = draft.lower_to_target

    def counted(model: ir.Model, target: Target) -> None:
        if not target.kernels:
            counts[model.graph.name or ""] += 1
        lower(model, target)

    for module in (draft, lowered_graphs):
        monkeypatch.setattr(module, "lower_to_target", counted)
    return counts


def small_program() -> burnish.Program:
    return burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="adam")


def test_one_that_is_asked_for_lowers_no_other(lowered):
    program = small_program()
    assert lowered == AT_ONCE
    assert program.graphs["predict"] is program.predict
    assert list(program.graphs) == ["init", "step", "grad", "apply", "evaluate", "predict"]
    assert lowered == AT_ONCE
    assert program.graphs["grad"] is program.grad
    assert lowered == AT_ONCE | {"grad": 1}
    assert program.graphs["step"] is program.graphs["step"]
    assert lowered == AT_ONCE | {"grad": 1, "step": 1}
    with pytest.raises(KeyError):
        program.graphs["backward"]


@pytest.mark.slow
def test_a_description_lowers_nothing(lowered):
    program = small_program()
    assert "step: not lowered yet, grad: not lowered yet, apply: " in repr(program)
    assert lowered == AT_ONCE
    assert f"step: {len(program.step.graph)} nodes, grad: {len(program.grad.graph)} nodes" in repr(program)


@pytest.mark.slow
def test_another_optimizer_lowers_what_it_changes(lowered):
    program = small_program()
    derived = program.with_optimizer("sgd")
    assert lowered == AT_ONCE | {"init": 2, "apply": 2}
    assert derived.grad is derived.graphs["grad"]
    assert program.grad is derived.grad
    assert derived.step is not program.step
    assert lowered == AT_ONCE | {"init": 2, "apply": 2, "grad": 1, "step": 2}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "reference"])
def test_predicting_and_evaluating_lower_no_step(monkeypatch, engine):
    program = small_program()
    made: list[str] = []
    lower = draft.lower_to_target

    def noted(model: ir.Model, target: Target) -> None:
        made.append(model.graph.name or "")
        lower(model, target)

    for module in (draft, lowered_graphs):
        monkeypatch.setattr(module, "lower_to_target", noted)
    session = burnish.Session(program, engine=STANDARD if engine == "onnxruntime" else engine)
    x = np.zeros((2, 1, 8, 8), np.float32)
    session.predict({"x": x})
    session.evaluate({"x": x, "labels": np.zeros(2, np.int64)})
    assert made == (["predict", "evaluate"] if engine == "torch" else [])
    session.step({"x": x, "labels": np.zeros(2, np.int64)})
    assert made[-1] == "step"
    # The step of a target with kernels is lowered as a whole.
    assert made.count("grad") == (0 if engine == "torch" else 1)


@pytest.mark.slow
@diagonal(
    ("optimizer", named(["adam", burnish.optim.accumulate(burnish.optim.adam(), 2)], ["plain", "accumulating"])),
    ("options", named([{}, {"shard_optimizer": True}], ["whole", "sharded"])),
)
def test_several_workers_lower_nothing_more(lowered, options, optimizer):
    program = burnish.compile(residual(), optimizer=optimizer)
    assert lowered == AT_ONCE
    train_in_threads(program, image_batches(2, 4), [[2, 2], [1, 3]], **options)
    assert lowered == AT_ONCE
