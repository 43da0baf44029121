"""Muon against PyTorch's, whose bfloat16 is taken out where digits count, and against the closed form by singular values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.optim.schedules import exponential
from oracles.combinations import spread
from oracles.layerwise_optimizers import (
    LAYERS,
    MATRICES,
    layers_problem,
    newton_schulz_of_singular_values,
    run_layers,
    torch_layers,
)
from oracles.optimizers import LR, UpdateGraph, assert_same_history, next_state, run_steps

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
OPTIONS = [
    {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay, "adjust_lr_fn": adjust, **iteration}
    for momentum, nesterov, decay, adjust, iteration in itertools.product(
        (0.95, 0.0),
        (True, False),
        (0.1, 0.0),
        (None, "original", "match_rms_adamw"),
        ({}, {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1.0}),
    )
]
OTHERS_SCALE = 0.25


def cases(options: list[dict[str, Any]], *, test: int | None = None) -> pytest.MarkDecorator:
    return spread("options", options, test=test, ids=lambda values: str(list(values.values())))


@pytest.fixture
def in_parameter_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's Muon iterate in the dtype of the parameter: all its mathematics, without the rounding to eight bits."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """NAdam keeps its product of momenta in PyTorch's default dtype, whatever that of the parameters is."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def muon_of_torch(
    options: dict[str, Any], flatten_kernels: bool = False, of_others: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """PyTorch's Muon for the matrices, and another of its optimizers for the other parameters."""

    def muon(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=LR, **options)

    def others(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return of_others(params, lr=LR * OTHERS_SCALE)

    makers = {name: muon if name in MATRICES else others for name in LAYERS}
    if flatten_kernels:
        del makers["kernel"]
        makers["kernel:matrix"] = muon
    return makers


@pytest.mark.usefixtures("in_parameter_dtype")
@cases(OPTIONS, test=6)
def test_matches_torch_in_float64(options: dict[str, Any]) -> None:
    expected, states = torch_layers(muon_of_torch(options), "float64")
    actual = run_layers(optim.muon(lr=LR, others="adamw", others_lr_scale=OTHERS_SCALE, **options), "float64")
    assert_same_history(actual, expected, rtol=1e-10, atol=1e-12)
    for name in MATRICES:
        momentum = states[name]["momentum_buffer"].numpy()
        np.testing.assert_allclose(actual[-1][f"opt/momentum/{name}"], momentum, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("in_parameter_dtype", "float64_by_default")
@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Rprop"])
def test_other_parameters_go_to_the_optimizer_that_is_named(name: str) -> None:
    expected, _ = torch_layers(muon_of_torch({}, of_others=getattr(torch.optim, name)), "float64")
    optimizer = optim.muon(lr=LR, others=name.lower(), others_lr_scale=OTHERS_SCALE)
    assert_same_history(run_layers(optimizer, "float64"), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("in_parameter_dtype")
@cases(OPTIONS[::7], test=4)
def test_kernels_are_matrices_of_their_first_extent_by_the_rest(options: dict[str, Any]) -> None:
    expected, _ = torch_layers(muon_of_torch(options, flatten_kernels=True), "float64")
    optimizer = optim.muon(lr=LR, flatten_kernels=True, others="adamw", others_lr_scale=OTHERS_SCALE, **options)
    assert_same_history(run_layers(optimizer, "float64"), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 6), (6, 1), (7, 2, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_acts_on_each_singular_value_by_itself(shape: tuple[int, ...], steps: int) -> None:
    rng = np.random.default_rng(17)
    start, gradient = rng.standard_normal(shape), rng.standard_normal(shape)
    optimizer = optim.muon(lr=1.0, weight_decay=0.0, ns_steps=steps, flatten_kernels=True)
    last = run_steps(optimizer, {"w": start}, lambda step, _: {"w": gradient}, 1)[-1]
    matrix = gradient.reshape(shape[0], -1)
    update = newton_schulz_of_singular_values(matrix, COEFFICIENTS, steps) * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    np.testing.assert_allclose(start - last["param/w"], update.reshape(shape), rtol=1e-10, atol=1e-12)


@cases(
    [{"nesterov": nesterov, "adjust_lr_fn": adjust} for nesterov in (True, False) for adjust in ("original", "match_rms_adamw")]
)
def test_finds_the_bottom_of_a_bowl_of_matrices(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(29)
    factor, bottom = rng.standard_normal((5, 5)), rng.standard_normal((5, 3))
    curvature = factor @ factor.T + np.eye(5)
    optimizer = optim.muon(lr=exponential(0.5, 0.98), weight_decay=0.0, **options)
    history = run_steps(
        optimizer, {"w": np.zeros((5, 3))}, lambda step, parameters: {"w": curvature @ (parameters["w"] - bottom)}, 900
    )
    np.testing.assert_allclose(history[-1]["param/w"], bottom, atol=1e-6)


@pytest.mark.slow
def test_goes_down_the_valley_of_rosenbrock_as_a_matrix() -> None:
    def gradient(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x, y = parameters["w"][0]
        return {"w": np.array([[-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)]])}

    optimizer = optim.muon(lr=exponential(0.02, 0.998), weight_decay=0.0)
    x, y = run_steps(optimizer, {"w": np.array([[-1.2, 1.0]])}, gradient, 4000)[-1]["param/w"][0]
    assert (1 - x) ** 2 + 100 * (y - x * x) ** 2 < 1e-4


def test_the_update_is_nearly_orthogonal() -> None:
    gradient = np.random.default_rng(19).standard_normal((12, 30))
    optimizer = optim.muon(lr=1.0, weight_decay=0.0)
    last = run_steps(optimizer, {"w": np.zeros((12, 30))}, lambda step, _: {"w": gradient}, 1)[-1]
    values = np.linalg.svd(last["param/w"], compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stays_near_torch_as_it_is(dtype: str) -> None:
    """PyTorch's iteration has eight bits, that is 0.004 of a number, and loses some of them: it is 0.013 of the norm away."""
    gradient = np.random.default_rng(23).standard_normal((16, 24)).astype(dtype)
    parameter = torch.zeros(16, 24, dtype=getattr(torch, dtype)).requires_grad_()
    parameter.grad = torch.from_numpy(gradient.copy())
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0).step()
    expected = parameter.detach().numpy()
    optimizer = optim.muon(lr=1.0, weight_decay=0.0)
    last = run_steps(optimizer, {"w": np.zeros((16, 24), dtype)}, lambda step, _: {"w": gradient}, 1)[-1]
    actual = last["param/w"]
    assert actual.dtype == dtype
    distance = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 0.0 < distance < 0.03


@pytest.mark.usefixtures("in_parameter_dtype")
def test_float32_stays_near_float64() -> None:
    expected, _ = torch_layers(muon_of_torch({}), "float32")
    actual = run_layers(optim.muon(lr=LR, others="adamw", others_lr_scale=OTHERS_SCALE), "float32")
    assert all(array.dtype == np.float32 for array in actual[-1].values())
    assert_same_history(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gradient_of_zero_leaves_a_matrix(dtype: str) -> None:
    initial, _ = layers_problem(dtype)
    nothing = {name: np.zeros_like(array) for name, array in initial.items()}
    optimizer = optim.muon(weight_decay=0.0, others="sgd")
    last = run_steps(optimizer, initial, lambda step, _: nothing, 2)[-1]
    for name, array in initial.items():
        np.testing.assert_array_equal(last[f"param/{name}"], array)


def test_other_parameters_share_the_rate_by_a_scale() -> None:
    optimizer = optim.muon(lr=0.5, others="sgd", others_lr_scale=0.25)
    assert optimizer.hyperparameters() == {"lr": 0.5}
    graphs = UpdateGraph(optimizer, {"w": (2, 2), "b": (2,)}, "float64")
    state = graphs.first_state({"w": np.ones((2, 2)), "b": np.ones(2)})
    feeds = {**state, "grad:w": np.zeros((2, 2)), "grad:b": np.ones(2), "step": np.int64(0)}
    following = next_state(graphs.apply.run(**feeds, lr=np.float32(2.0)))
    np.testing.assert_array_equal(following["param/w"], np.full((2, 2), 0.8))
    np.testing.assert_array_equal(following["param/b"], np.full(2, 0.5))


def test_a_model_of_matrices_needs_no_other_optimizer() -> None:
    for others in (None, "adamw"):
        graphs = UpdateGraph(optim.muon(others=others), {"w": (2, 3), "v": (3, 2)}, "float32")
        graphs.initial.check()
        graphs.apply.check()
        assert set(graphs.next_state) == {"momentum/w", "momentum/v"}


def test_options_build_it_again() -> None:
    for optimizer in (
        optim.muon(),
        optim.muon(others=None, ns_coefficients=(2, -1.5, 0.5), adjust_lr_fn="match_rms_adamw", flatten_kernels=True),
        optim.muon(others={"name": "sgd", "momentum": 0.9}, others_lr_scale=0.5),
        optim.muon(others={"name": "adam", "betas": (0.8, 0.9)}),
    ):
        assert optim.get(json.loads(json.dumps(optimizer.options()))) == optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.muon(lr=-1), "muon: lr must be a finite number that is not negative, not -1"),
        (lambda: optim.muon(momentum=1.0), "muon: momentum must be at least 0 and less than 1, not 1.0"),
        (lambda: optim.muon(weight_decay=-1), "muon: weight_decay must be a finite number that is not negative, not -1"),
        (lambda: optim.muon(eps=0), "muon: eps must be a finite number above 0, not 0"),
        (lambda: optim.muon(ns_coefficients=(1, 2)), r"muon: ns_coefficients must be three numbers, not \(1, 2\)"),
        (
            lambda: optim.muon(ns_coefficients=(1, 2, float("nan"))),
            r"muon: ns_coefficients\[2\] must be a finite number, not nan",
        ),
        (lambda: optim.muon(ns_steps=0), "muon: ns_steps must be a whole number from 1 to 99, not 0"),
        (lambda: optim.muon(ns_steps=100), "muon: ns_steps must be a whole number from 1 to 99, not 100"),
        (lambda: optim.muon(ns_steps=2.5), "muon: ns_steps must be a whole number from 1 to 99, not 2.5"),
        (
            lambda: optim.muon(adjust_lr_fn="adam"),
            "muon: adjust_lr_fn must be one of original, match_rms_adamw, or None, not 'adam'",
        ),
        (lambda: optim.muon(others="adma"), "there is no optimizer 'adma'"),
        (
            lambda: optim.muon(others=3),
            "muon: others must be the name or the options, without lr, of a plain optimizer .*, not 3",
        ),
        (lambda: optim.muon(others=optim.adam(lr=0.1)), "muon: others must be the name or the options, without lr, .*, not Adam"),
        (lambda: optim.muon(others="muon"), "muon: others must be .* for parameters of every shape, or None, not Muon"),
        (
            lambda: optim.muon(others={"name": "adam", "lr": 0.1}),
            "muon: others takes muon's own rate; leave out its lr, and give others_lr_scale instead",
        ),
        (lambda: optim.muon(others_lr_scale=-1), "muon: others_lr_scale must be a finite number that is not negative, not -1"),
        (
            lambda: UpdateGraph(optim.muon(others=None), {"w": (2, 2), "b": (2,), "k": (2, 2, 1)}, "float32"),
            "muon: 2 of 3 parameters are no matrices, such as 'b', and others is None; give an optimizer for them as others",
        ),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
