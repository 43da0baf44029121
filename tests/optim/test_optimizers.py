"""Every optimizer against PyTorch's, step for step, and what holds for all of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from burnish import optim
from burnish.errors import ConfigurationError
from oracles.combinations import spread
from oracles.optimizers import (
    LR,
    UpdateGraph,
    assert_same_history,
    random_problem,
    run_random_problem,
    torch_steps,
)

SGD_OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay}
    for momentum, dampening, nesterov, decay in itertools.product((0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.05))
    if not nesterov or (momentum and not dampening)
]
ADAM_OPTIONS = [
    {"betas": betas, "eps": eps, "weight_decay": decay, "amsgrad": amsgrad}
    for betas, eps, decay, amsgrad in itertools.product(
        ((0.9, 0.999), (0.5, 0.9), (0.0, 0.0)), (1e-8, 1e-3), (0.0, 0.05), (False, True)
    )
]
CASES = [
    *(("sgd", torch.optim.SGD, options) for options in SGD_OPTIONS),
    *(("adam", torch.optim.Adam, options) for options in ADAM_OPTIONS),
    *(("adamw", torch.optim.AdamW, options) for options in ADAM_OPTIONS),
]
every_case = spread(
    ("name", "torch_optimizer", "options"),
    CASES,
    test=11,
    ids=[f"{name}-{list(options.values())}" for name, _, options in CASES],
)
# Every switch of Adam is among these; how they combine, float64 covers.
SOME_CASES = [*CASES[: len(SGD_OPTIONS)], *CASES[len(SGD_OPTIONS) :: 5]]
some_cases = pytest.mark.parametrize(
    ("name", "torch_optimizer", "options"),
    SOME_CASES,
    ids=[f"{name}-{list(options.values())}" for name, _, options in SOME_CASES],
)
every_optimizer = pytest.mark.parametrize(
    "optimizer", [optim.sgd(momentum=0.9), optim.adam(amsgrad=True), optim.adamw()], ids=lambda optimizer: optimizer.name
)


@every_case
def test_matches_torch_in_float64(name: str, torch_optimizer: Callable[..., Any], options: dict[str, Any]) -> None:
    actual = run_random_problem(getattr(optim, name)(lr=LR, **options), "float64")
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float64"), rtol=1e-10, atol=1e-12)


@some_cases
def test_float32_stays_near_float64(name: str, torch_optimizer: Callable[..., Any], options: dict[str, Any]) -> None:
    actual = run_random_problem(getattr(optim, name)(lr=LR, **options), "float32")
    assert all(array.dtype == np.float32 for array in actual[-1].values())
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float32"), rtol=2e-5, atol=2e-5)


def test_the_state_is_that_of_torch() -> None:
    initial, gradients = random_problem("float64")
    parameter = torch.from_numpy(initial["weight"].copy()).requires_grad_()
    reference = torch.optim.Adam([parameter], lr=LR, amsgrad=True)
    for step_gradients in gradients:
        parameter.grad = torch.from_numpy(step_gradients["weight"].copy())
        reference.step()
    last = run_random_problem(optim.adam(lr=LR, amsgrad=True), "float64")[-1]
    slots = {"first_moment": "exp_avg", "second_moment": "exp_avg_sq", "largest_second_moment": "max_exp_avg_sq"}
    for slot, theirs in slots.items():
        np.testing.assert_allclose(last[f"opt/{slot}/weight"], reference.state[parameter][theirs].numpy(), rtol=1e-12)


def test_the_learning_rate_is_read_at_every_step() -> None:
    optimizer = optim.sgd(lr=0.5)
    graphs = UpdateGraph(optimizer, {"w": (2,)}, "float64")
    feeds = {"param/w": np.array([1.0, 2.0]), "grad:w": np.array([1.0, -1.0]), "step": np.int64(0)}
    result = graphs.apply.run(**feeds, lr=np.float32(0.25))
    np.testing.assert_array_equal(result["next:param/w"], [0.75, 2.25])


@every_optimizer
def test_the_initial_state_is_zero_and_costs_no_bytes_in_the_graph(optimizer: optim.Optimizer) -> None:
    for known in (True, False):
        graphs = UpdateGraph(optimizer, {"w": (300, 400)}, "float64", known=known)
        assert len(graphs.initial.model().SerializeToString()) < 4000
        results = graphs.initial.run(**{"param/w": np.ones((300, 400))})
        assert results
        for array in results.values():
            assert array.shape == (300, 400)
            assert array.dtype == np.float64
            assert not array.any()


# The passes over each parameter: whatever else a graph holds acts on scalars, and its number does not grow.
PASSES = [
    (optim.sgd(), 2),
    (optim.sgd(weight_decay=0.1), 4),
    (optim.sgd(momentum=0.9), 4),
    (optim.sgd(momentum=0.9, nesterov=True), 6),
    (optim.sgd(momentum=0.9, weight_decay=0.1), 6),
    (optim.adam(), 12),
    (optim.adam(amsgrad=True), 13),
    (optim.adamw(), 13),
]


@pytest.mark.parametrize(("optimizer", "passes"), PASSES, ids=[str(optimizer.options()) for optimizer, _ in PASSES])
def test_each_parameter_costs_few_nodes(optimizer: optim.Optimizer, passes: int) -> None:
    one = UpdateGraph(optimizer, {"a": (4,)}, "float32").apply.operators()
    three = UpdateGraph(optimizer, {"a": (4,), "b": (5, 6), "c": (7,)}, "float32").apply.operators()
    assert len(three) - len(one) == 2 * passes
    assert len(one) - passes <= 16
    if optimizer.name == "sgd":
        assert len(one) == passes


def test_a_name_its_options_and_the_object_all_resolve() -> None:
    assert optim.get("sgd") == optim.sgd()
    assert optim.get("adam") == optim.adam()
    assert optim.get("adamw") == optim.adamw()
    assert optim.get("adamw:lr=0.1,betas=[0.8, 0.9],amsgrad=true") == optim.adamw(0.1, betas=(0.8, 0.9), amsgrad=True)
    for optimizer in (optim.sgd(0.3, 0.9, nesterov=True), optim.adam(betas=(0.8, 0.9)), optim.adamw(amsgrad=True)):
        assert optim.get(optimizer) is optimizer
        assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer
        assert isinstance(optimizer, optim.Optimizer)
        assert optimizer.hyperparameters() == {"lr": optimizer.lr}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(lr=-0.1), "sgd: lr must be a finite number that is not negative, not -0.1"),
        (lambda: optim.sgd(momentum=-1), "sgd: momentum must be a finite number that is not negative, not -1"),
        (lambda: optim.sgd(weight_decay=float("nan")), "sgd: weight_decay must be a finite number"),
        (lambda: optim.sgd(dampening=float("inf"), momentum=0.9), "sgd: dampening must be a finite number, not inf"),
        (lambda: optim.sgd(nesterov=True), "sgd: nesterov needs a momentum above 0 and no dampening, not momentum 0.0"),
        (lambda: optim.sgd(momentum=0.9, dampening=0.1, nesterov=True), "sgd: nesterov needs .* dampening 0.1"),
        (lambda: optim.adam(lr=float("inf")), "adam: lr must be a finite number"),
        (lambda: optim.adam(betas=(1.0, 0.9)), r"adam: betas\[0\] must be at least 0 and less than 1, not 1.0"),
        (lambda: optim.adamw(betas=(0.9, -0.1)), r"adamw: betas\[1\] must be at least 0 and less than 1, not -0.1"),
        (lambda: optim.adam(betas=(0.9,)), "adam: betas must be two numbers"),
        (lambda: optim.adam(betas=0.9), "adam: betas must be two numbers, not 0.9"),
        (lambda: optim.adamw(eps=-1e-8), "adamw: eps must be a finite number that is not negative"),
        (
            lambda: optim.sgd(lr="fast"),
            "sgd: lr must be a finite number that is not negative, or a schedule of burnish.optim.schedules, not 'fast'",
        ),
        (
            lambda: optim.get("sdg"),
            r"there is no optimizer 'sdg' \(did you mean 'sgd'\?\); choose among " + ", ".join(sorted(optim.OPTIMIZERS)),
        ),
        (lambda: optim.get({"name": "sgd", "beta": 1}), "optimizer 'sgd' has no option 'beta'; it takes lr, momentum"),
        (lambda: optim.get({"lr": 1}), "the options of an optimizer have a 'name', and these have only 'lr'"),
        (lambda: optim.get("ema"), r"optimizer 'ema' goes around another one: give the object, burnish.optim.ema\("),
        (lambda: optim.get("sgd:nesterov"), "optimizer 'sgd:nesterov': settings are written name=value, .* not 'nesterov'"),
        (lambda: optim.get("sgd:lr=1,lr=2"), "optimizer 'sgd:lr=1,lr=2' gives lr twice"),
        (lambda: optim.get("sgd:momentum=fast"), "sgd: momentum must be a finite number .* not 'fast'"),
        (lambda: optim.get(optim.AdamW), r"not the class 'AdamW': call it, as in burnish.optim.adamw\(\.\.\.\)"),
        (lambda: optim.get(0.1), "an optimizer is a name or an object of burnish.optim, not 0.1"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
