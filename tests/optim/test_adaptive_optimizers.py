"""The optimizers that give every element or row a rate of its own, against PyTorch's step for step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from burnish import optim
from burnish.errors import ConfigurationError
from oracles.combinations import spread
from oracles.optimizers import (
    LR,
    SHAPES,
    STEPS,
    Arrays,
    UpdateGraph,
    assert_same_history,
    random_problem,
    run_random_problem,
    run_steps,
    torch_steps,
)


def combinations(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of the options."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


CASES: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    *(
        ("nadam", torch.optim.NAdam, options)
        for options in combinations(
            betas=((0.9, 0.999), (0.0, 0.0)),
            eps=(1e-8, 1e-3),
            weight_decay=(0.0, 0.05),
            momentum_decay=(4e-3, 0.0, 0.7),
            decoupled_weight_decay=(False, True),
        )
    ),
    # The average of beta2 = 0.6 is too short to adapt ever, that of 0.9 long enough after six steps.
    *(
        ("radam", torch.optim.RAdam, options)
        for options in combinations(
            betas=((0.9, 0.999), (0.5, 0.9), (0.0, 0.6), (0.0, 0.0)),
            eps=(1e-8, 1e-3),
            weight_decay=(0.0, 0.05),
            decoupled_weight_decay=(False, True),
        )
    ),
    *(
        ("adagrad", torch.optim.Adagrad, options)
        for options in combinations(
            lr_decay=(0.0, 0.1), weight_decay=(0.0, 0.05), initial_accumulator_value=(0.0, 0.3), eps=(1e-10, 1e-3)
        )
    ),
    *(
        ("adadelta", torch.optim.Adadelta, options)
        for options in combinations(rho=(0.9, 0.0, 0.99), eps=(1e-6, 1e-3), weight_decay=(0.0, 0.05))
    ),
    *(
        ("rmsprop", torch.optim.RMSprop, options)
        for options in combinations(
            alpha=(0.99, 0.5), eps=(1e-8, 1e-3), weight_decay=(0.0, 0.05), momentum=(0.0, 0.9), centered=(False, True)
        )
    ),
    *(
        ("adamax", torch.optim.Adamax, options)
        for options in combinations(betas=((0.9, 0.999), (0.5, 0.9), (0.0, 0.0)), eps=(1e-8, 1e-3), weight_decay=(0.0, 0.05))
    ),
]


def name_of(case: tuple[str, Callable[..., Any], dict[str, Any]]) -> str:
    name, _, options = case
    return f"{name}-{list(options.values())}"


@spread("case", CASES, test=18, ids=name_of, test_all=50)
def test_matches_torch_in_float64(case: tuple[str, Callable[..., Any], dict[str, Any]]) -> None:
    name, torch_optimizer, options = case
    actual = run_random_problem(optim.OPTIMIZERS[name](lr=LR, **options), "float64")
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float64"), rtol=1e-10, atol=1e-12)


# Those with the larger eps: beside it, the rounding of a small mean square does not decide over the update.
@spread("case", [case for case in CASES if case[2]["eps"] == 1e-3][::3], test=11, ids=name_of)
def test_float32_stays_near_float64(case: tuple[str, Callable[..., Any], dict[str, Any]]) -> None:
    name, torch_optimizer, options = case
    actual = run_random_problem(optim.OPTIMIZERS[name](lr=LR, **options), "float32")
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float32"), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "torch_optimizer", "options", "slots"),
    [
        (
            "nadam",
            torch.optim.NAdam,
            {},
            {"first_moment/weight": "exp_avg", "second_moment/weight": "exp_avg_sq", "momentum_product": "mu_product"},
        ),
        ("radam", torch.optim.RAdam, {}, {"first_moment/weight": "exp_avg", "second_moment/weight": "exp_avg_sq"}),
        ("adagrad", torch.optim.Adagrad, {"initial_accumulator_value": 0.25}, {"sum_of_squares/weight": "sum"}),
        (
            "adadelta",
            torch.optim.Adadelta,
            {},
            {"squared_gradient/weight": "square_avg", "squared_update/weight": "acc_delta"},
        ),
        (
            "rmsprop",
            torch.optim.RMSprop,
            {"momentum": 0.5, "centered": True},
            {"squared_gradient/weight": "square_avg", "mean_gradient/weight": "grad_avg", "momentum/weight": "momentum_buffer"},
        ),
        ("adamax", torch.optim.Adamax, {}, {"first_moment/weight": "exp_avg", "largest_gradient/weight": "exp_inf"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_state_is_that_of_torch(
    name: str, torch_optimizer: Callable[..., Any], options: dict[str, Any], slots: dict[str, str]
) -> None:
    _, gradients = random_problem("float64")
    torch.set_default_dtype(torch.float64)
    try:
        parameter = torch.from_numpy(random_problem("float64")[0]["weight"].copy()).requires_grad_()
        reference = torch_optimizer([parameter], lr=LR, **options)
        for step_gradients in gradients:
            parameter.grad = torch.from_numpy(step_gradients["weight"].copy())
            reference.step()
    finally:
        torch.set_default_dtype(torch.float32)
    last = run_random_problem(optim.OPTIMIZERS[name](lr=LR, **options), "float64")[-1]
    for slot, theirs in slots.items():
        np.testing.assert_allclose(last[f"opt/{slot}"], reference.state[parameter][theirs].numpy(), rtol=1e-11, err_msg=slot)


def rowwise_adagrad_steps(initial: Arrays, gradients: list[Arrays], eps: float, weight_decay: float) -> list[Arrays]:
    """Row by row, as the formula says it."""
    state = {f"param/{name}": array.copy() for name, array in initial.items()}
    state |= {f"opt/sum_of_mean_squares/{name}": np.zeros(array.shape[:1]) for name, array in initial.items()}
    history = []
    for step_gradients in gradients:
        state = {name: array.copy() for name, array in state.items()}
        for name, gradient in step_gradients.items():
            parameter, total = state[f"param/{name}"], state[f"opt/sum_of_mean_squares/{name}"]
            for place in np.ndindex(parameter.shape[:1]):
                g = gradient[place] + weight_decay * parameter[place]
                total[place] += np.sum(g**2) / np.size(g)
                parameter[place] -= LR / (np.sqrt(total[place]) + eps) * g
        history.append(state)
    return history


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_rowwise_adagrad_matches_its_formula(eps: float, weight_decay: float) -> None:
    initial, gradients = random_problem("float64")
    rng = np.random.default_rng(8)
    initial = initial | {"filters": rng.standard_normal((3, 2, 2, 2))}
    gradients = [step | {"filters": rng.standard_normal((3, 2, 2, 2))} for step in gradients]
    optimizer = optim.rowwise_adagrad(lr=LR, eps=eps, weight_decay=weight_decay)
    actual = run_steps(optimizer, initial, lambda step, _: gradients[step], STEPS)
    assert_same_history(actual, rowwise_adagrad_steps(initial, gradients, eps, weight_decay), rtol=1e-10, atol=1e-12)
    assert actual[-1]["opt/sum_of_mean_squares/filters"].shape == (3,)


def test_rowwise_adagrad_keeps_the_rows_without_a_gradient() -> None:
    table = np.random.default_rng(1).standard_normal((6, 3))
    gradient = np.zeros_like(table)
    gradient[[1, 4]] = 1.0
    last = run_steps(optim.rowwise_adagrad(), {"table": table}, lambda *_: {"table": gradient}, 3)[-1]
    np.testing.assert_array_equal((last["param/table"] != table).any(axis=1), [False, True, False, False, True, False])


def test_rowwise_adagrad_makes_its_state_where_the_extents_are_open() -> None:
    initial, _ = random_problem("float32")
    graphs = UpdateGraph(optim.rowwise_adagrad(), SHAPES, "float32", known=False)
    state = graphs.first_state(initial)
    assert {name: array.shape for name, array in state.items() if name.startswith("opt/")} == {
        "opt/sum_of_mean_squares/weight": (3,),
        "opt/sum_of_mean_squares/bias": (4,),
        "opt/sum_of_mean_squares/scale": (),
    }


def test_adagrad_starts_where_it_is_told_and_costs_no_bytes_in_the_graph() -> None:
    graphs = UpdateGraph(optim.adagrad(initial_accumulator_value=0.5), {"w": (300, 400)}, "float32")
    assert len(graphs.initial.model().SerializeToString()) < 4000
    state = graphs.first_state({"w": np.ones((300, 400), "float32")})
    np.testing.assert_array_equal(state["opt/sum_of_squares/w"], np.full((300, 400), 0.5, "float32"))


def test_a_constant_gradient_leaves_centered_rmsprop_finite() -> None:
    """v - a² is what rounding leaves of two equal numbers, on either side of zero."""
    gradient = np.random.default_rng(5).standard_normal(64).astype("float32")
    optimizer = optim.rmsprop(alpha=0.9, centered=True)
    history = run_steps(optimizer, {"w": np.zeros(64, "float32")}, lambda *_: {"w": gradient}, 400)
    squared, mean = (history[-1][f"opt/{slot}/w"] for slot in ("squared_gradient", "mean_gradient"))
    assert (squared - mean * mean < 0).any()
    assert np.isfinite(history[-1]["param/w"]).all()


# The passes over each parameter: whatever else a graph holds acts on scalars or rows, and its number does not grow.
PASSES = [
    (optim.nadam(), 14),
    (optim.nadam(weight_decay=0.1, decoupled_weight_decay=True), 15),
    (optim.radam(), 13),
    (optim.radam(betas=(0.9, 0.5)), 9),
    (optim.adagrad(), 7),
    (optim.adagrad(lr_decay=0.1, weight_decay=0.1), 9),
    (optim.rowwise_adagrad(), 9),
    (optim.adadelta(), 15),
    (optim.rmsprop(), 9),
    (optim.rmsprop(momentum=0.9, centered=True), 17),
    (optim.adamax(), 10),
]


@pytest.mark.parametrize(("optimizer", "passes"), PASSES, ids=[str(optimizer.options()) for optimizer, _ in PASSES])
def test_each_parameter_costs_few_nodes(optimizer: optim.Optimizer, passes: int) -> None:
    one = UpdateGraph(optimizer, {"a": (4, 2)}, "float32").apply.operators()
    three = UpdateGraph(optimizer, {"a": (4, 2), "b": (5, 6), "c": (7, 3)}, "float32").apply.operators()
    assert len(three) - len(one) == 2 * passes
    assert len(one) - passes <= 40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.nadam(lr=-1.0), "nadam: lr must be a finite number that is not negative, not -1.0"),
        (lambda: optim.nadam(betas=(0.9, 1.0)), r"nadam: betas\[1\] must be at least 0 and less than 1, not 1.0"),
        (
            lambda: optim.nadam(momentum_decay=-0.1),
            "nadam: momentum_decay must be a finite number that is not negative, not -0.1",
        ),
        (lambda: optim.radam(betas=0.9), "radam: betas must be two numbers, not 0.9"),
        (lambda: optim.radam(weight_decay=-1), "radam: weight_decay must be a finite number that is not negative, not -1"),
        (lambda: optim.adagrad(lr_decay=float("nan")), "adagrad: lr_decay must be a finite number that is not negative, not nan"),
        (
            lambda: optim.adagrad(initial_accumulator_value=-1.0),
            "adagrad: initial_accumulator_value must be a finite number that is not negative, not -1.0",
        ),
        (lambda: optim.rowwise_adagrad(eps=-1e-8), "rowwise_adagrad: eps must be a finite number that is not negative"),
        (lambda: optim.rowwise_adagrad(lr="fast"), "rowwise_adagrad: lr must be a finite number .* not 'fast'"),
        (lambda: optim.adadelta(rho=1.0), "adadelta: rho must be at least 0 and less than 1, not 1.0"),
        (lambda: optim.adadelta(eps=float("inf")), "adadelta: eps must be a finite number that is not negative, not inf"),
        (lambda: optim.rmsprop(alpha=-0.5), "rmsprop: alpha must be at least 0 and less than 1, not -0.5"),
        (lambda: optim.rmsprop(momentum=-0.9), "rmsprop: momentum must be a finite number that is not negative, not -0.9"),
        (lambda: optim.adamax(betas=(0.9,)), r"adamax: betas must be two numbers, not \(0.9,\)"),
        (lambda: optim.adamax(lr=float("inf")), "adamax: lr must be a finite number .*, not inf"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
