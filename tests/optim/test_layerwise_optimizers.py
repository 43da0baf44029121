"""Lion, LAMB and LARS against optax, Adafactor against PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch

from burnish import optim
from burnish.errors import ConfigurationError
from oracles.combinations import covering, spread
from oracles.layerwise_optimizers import LAYERS, layers_problem, optax_lamb, optax_lars, optax_layers, run_layers, torch_layers
from oracles.optimizers import LR, UpdateGraph, assert_same_history, run_steps

LION_OPTIONS = [{"betas": betas, "weight_decay": decay} for betas, decay in covering(((0.9, 0.99), (0.5, 0.8)), (0.0, 0.05))]
LAMB_OPTIONS = [
    {"betas": betas, "eps": eps, "weight_decay": decay, "adapt_vectors": vectors}
    for betas, eps, decay, vectors in covering(((0.9, 0.999), (0.5, 0.9)), (1e-6, 1e-3), (0.0, 0.05), (True, False))
]
LARS_OPTIONS = [
    {
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": decay,
        "trust_coefficient": coefficient,
        "eps": eps,
        "adapt_vectors": vectors,
    }
    for (momentum, nesterov), decay, (coefficient, eps), vectors in covering(
        ((0.0, False), (0.9, False), (0.9, True)), (0.0, 0.05), ((1e-3, 0.0), (1.0, 1e-2)), (True, False)
    )
]
ADAFACTOR_OPTIONS = [
    {"beta2_decay": decay, "eps": eps, "clipping_threshold": threshold, "weight_decay": weight_decay}
    for decay, eps, threshold, weight_decay in covering((-0.8, -0.5), ((None, 1e-3), (1e-3, 2.0)), (1.0, 1.5), (0.0, 0.05))
]


def optax_lion(lr: float, betas: tuple[float, float], weight_decay: float) -> optax.GradientTransformation:
    return optax.lion(lr, *betas, weight_decay=weight_decay)


OPTAX_CASES = [
    *((optim.lion, optax_lion, options) for options in LION_OPTIONS),
    *((optim.lamb, optax_lamb, options) for options in LAMB_OPTIONS),
    *((optim.lars, optax_lars, options) for options in LARS_OPTIONS),
]
QUICK_OPTIONS = [*LION_OPTIONS[::3], *LAMB_OPTIONS[::7], *(LARS_OPTIONS[number] for number in (0, 7, 11))]
EVERY_VALUE = [case for case in OPTAX_CASES if case[2] in QUICK_OPTIONS]
"""Cases in which every value of every option stands; how any three combine is seen by make test-all."""


def optax_cases(
    cases: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]], *, test: int | None = None
) -> pytest.MarkDecorator:
    ids = [f"{make.__name__}-{list(options.values())}" for make, _, options in cases]
    rows = [pytest.param(*case, marks=() if case in EVERY_VALUE else pytest.mark.slow) for case in cases]
    return spread(("make", "reference", "options"), rows, test=test, ids=ids)


def adafactor_cases(cases: list[dict[str, Any]], *, test: int | None = None) -> pytest.MarkDecorator:
    return spread("options", cases, test=test, ids=lambda options: str(list(options.values())))


@functools.cache
def of_optax(reference: Callable[..., optax.GradientTransformation], *options: tuple[str, Any]) -> optax.GradientTransformation:
    """One and the same object for the same options: JAX compiles it once."""
    return reference(lr=LR, **dict(options))


@pytest.mark.slow
@optax_cases(OPTAX_CASES)
def test_matches_optax_in_float64(make: Callable[..., Any], reference: Callable[..., Any], options: dict[str, Any]) -> None:
    expected = optax_layers(of_optax(reference, *options.items()), "float64")
    assert_same_history(run_layers(make(lr=LR, **options), "float64"), expected, rtol=1e-10, atol=1e-12)


# How the values of the options combine, float64 covers.
@pytest.mark.slow
@optax_cases(EVERY_VALUE)
def test_float32_stays_near_float64(make: Callable[..., Any], reference: Callable[..., Any], options: dict[str, Any]) -> None:
    actual = run_layers(make(lr=LR, **options), "float32")
    assert all(array.dtype == np.float32 for array in actual[-1].values())
    assert_same_history(actual, optax_layers(of_optax(reference, *options.items()), "float32"), rtol=2e-5, atol=2e-5)


def torch_adafactor(options: dict[str, Any], dtype: str) -> tuple[list[dict[str, np.ndarray]], dict[str, Any]]:
    settings = {("d" if name == "clipping_threshold" else name): value for name, value in options.items()}
    if dtype == "float32" and settings["eps"][0] is None:
        settings["eps"] = (float(np.finfo("float32").eps), settings["eps"][1])
    return torch_layers({name: lambda params: torch.optim.Adafactor(params, lr=LR, **settings) for name in LAYERS}, dtype)


@adafactor_cases(ADAFACTOR_OPTIONS, test=3)
def test_adafactor_matches_torch_in_float64(options: dict[str, Any]) -> None:
    expected, states = torch_adafactor(options, "float64")
    actual = run_layers(optim.adafactor(lr=LR, **options), "float64")
    assert_same_history(actual, expected, rtol=1e-10, atol=1e-12)
    slots = {"row_variance": "row_var", "column_variance": "col_var", "variance": "variance"}
    for name, shape in LAYERS.items():
        for slot in ("row_variance", "column_variance") if len(shape) > 1 else ("variance",):
            np.testing.assert_allclose(actual[-1][f"opt/{slot}/{name}"], states[name][slots[slot]].numpy(), rtol=1e-10)


@adafactor_cases(ADAFACTOR_OPTIONS[::7])
def test_adafactor_in_float32_stays_near_float64(options: dict[str, Any]) -> None:
    actual = run_layers(optim.adafactor(lr=LR, **options), "float32")
    assert all(array.dtype == np.float32 for array in actual[-1].values())
    assert_same_history(actual, torch_adafactor(options, "float32")[0], rtol=2e-5, atol=2e-5)


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    graphs = UpdateGraph(optim.adafactor(), {"w": (300, 400), "kernel": (8, 4, 3, 3), "bias": (5,)}, "float32")
    graphs.initial.check()
    graphs.apply.check()
    state = graphs.first_state(
        {name: np.ones(shape, "float32") for name, shape in {"w": (300, 400), "kernel": (8, 4, 3, 3), "bias": (5,)}.items()}
    )
    slots = {name: array.shape for name, array in state.items() if name.startswith("opt/")}
    assert slots == {
        "opt/row_variance/w": (300, 1),
        "opt/column_variance/w": (1, 400),
        "opt/row_variance/kernel": (8, 4, 3, 1),
        "opt/column_variance/kernel": (8, 4, 1, 3),
        "opt/variance/bias": (5,),
    }


@pytest.mark.parametrize("eps", [(None, 1e-3), (1e-30, 1e-3)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_adafactor_leaves_what_has_no_gradient(dtype: str, eps: tuple[float | None, float]) -> None:
    initial, _ = layers_problem(dtype)
    nothing = {name: np.zeros_like(array) for name, array in initial.items()}
    last = run_steps(optim.adafactor(eps=eps), initial, lambda step, _: nothing, 3)[-1]
    for name, array in initial.items():
        np.testing.assert_array_equal(last[f"param/{name}"], array)


def test_adafactor_in_float32_takes_small_gradients_for_what_they_are() -> None:
    """Squares of 1e-15 are above the least number of float32, products of two such squares are not."""
    initial = {"w": np.ones((3, 4), "float32")}
    gradient = np.random.default_rng(5).standard_normal((3, 4)).astype("float32")
    large = run_steps(optim.adafactor(eps=(1e-18, 1e-3)), initial, lambda step, _: {"w": gradient}, 3)[-1]
    small = run_steps(optim.adafactor(eps=(1e-38, 1e-3)), initial, lambda step, _: {"w": gradient * np.float32(2.0**-50)}, 3)[-1]
    np.testing.assert_allclose(small["param/w"], large["param/w"], rtol=1e-6)


def test_the_norm_of_a_large_layer_keeps_the_digits_of_float32() -> None:
    """A million squares of one sign, added up one by one in float32, would leave five digits."""
    rng = np.random.default_rng(13)
    start, gradient = (rng.standard_normal((1024, 1024)).astype("float32") + 3 for _ in range(2))
    last = run_steps(optim.lars(lr=1.0, momentum=0.0, trust_coefficient=1.0), {"w": start}, lambda step, _: {"w": gradient}, 1)[
        -1
    ]
    ratio = np.linalg.norm(start.astype("float64")) / np.linalg.norm(gradient.astype("float64"))
    change = start.astype("float64") - last["param/w"]
    np.testing.assert_allclose(change, ratio * gradient.astype("float64"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [optim.lamb(), optim.lars()], ids=lambda optimizer: optimizer.name)
def test_a_gradient_that_is_not_a_number_reaches_the_weights(optimizer: optim.Optimizer) -> None:
    """So that whoever looks at them sees it: the ratio must not hide it."""
    gradient = np.array([np.nan, 1.0])
    last = run_steps(optimizer, {"w": np.ones(2)}, lambda step, _: {"w": gradient}, 1)[-1]
    assert np.isnan(last["param/w"][0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.lion(lr=-1), "lion: lr must be a finite number that is not negative, not -1"),
        (lambda: optim.lion(betas=(0.9, 1.0)), r"lion: betas\[1\] must be at least 0 and less than 1, not 1.0"),
        (lambda: optim.lion(weight_decay=-0.1), "lion: weight_decay must be a finite number that is not negative, not -0.1"),
        (lambda: optim.lamb(betas=0.9), "lamb: betas must be two numbers, not 0.9"),
        (lambda: optim.lamb(eps=float("nan")), "lamb: eps must be a finite number that is not negative, not nan"),
        (lambda: optim.lamb(weight_decay="no"), "lamb: weight_decay must be a finite number that is not negative, not 'no'"),
        (lambda: optim.lars(momentum=-1), "lars: momentum must be a finite number that is not negative, not -1"),
        (
            lambda: optim.lars(trust_coefficient=-1),
            "lars: trust_coefficient must be a finite number that is not negative, not -1",
        ),
        (lambda: optim.lars(eps=-1), "lars: eps must be a finite number that is not negative, not -1"),
        (lambda: optim.lars(momentum=0.0, nesterov=True), "lars: nesterov needs a momentum above 0, not 0.0"),
        (lambda: optim.adafactor(lr="fast"), "adafactor: lr must be a finite number that is not negative, or a schedule"),
        (lambda: optim.adafactor(beta2_decay=0.1), "adafactor: beta2_decay must be 0 or below, not 0.1"),
        (lambda: optim.adafactor(beta2_decay=float("-inf")), "adafactor: beta2_decay must be a finite number, not -inf"),
        (lambda: optim.adafactor(clipping_threshold=0.5), "adafactor: clipping_threshold must be at least 1, not 0.5"),
        (
            lambda: optim.adafactor(weight_decay=-1),
            "adafactor: weight_decay must be a finite number that is not negative, not -1",
        ),
        (lambda: optim.adafactor(eps=1e-3), "adafactor: eps must be two numbers, the first of which may be None, not 0.001"),
        (lambda: optim.adafactor(eps=(0.0, 1e-3)), r"adafactor: eps\[0\] must be a finite number above 0, not 0.0"),
        (
            lambda: optim.adafactor(eps=(None, None)),
            r"adafactor: eps\[1\] must be a finite number that is not negative, not None",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
