"""Averaged SGD and Rprop, against PyTorch's step for step, and what is their own: an average to export, a first step size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import burnish
from burnish import optim
from burnish.errors import ConfigurationError
from burnish.models import residual_network
from burnish.optim import schedules
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

ASGD_OPTIONS = [
    {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": decay}
    for lambd, alpha, t0, decay in itertools.product((1e-4, 0.0, 0.5), (0.75, 0.0, 2.0), (1e6, 0, 10, 2.5), (0.0, 0.05))
]
RPROP_OPTIONS = [
    {"etas": etas, "step_sizes": sizes}
    for etas, sizes in itertools.product(((0.5, 1.2), (0.25, 1.5)), ((1e-6, 50.0), (2.0**-7, 2.0**-5), (2.0**-6, 2.0**-6)))
]
CASES: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    *(("asgd", torch.optim.ASGD, options) for options in ASGD_OPTIONS),
    *(("rprop", torch.optim.Rprop, options) for options in RPROP_OPTIONS),
]
every_case = spread(
    ("name", "torch_optimizer", "options"),
    CASES,
    test=9,
    ids=[f"{name}-{list(options.values())}" for name, _, options in CASES],
)
SLOTS = {
    "asgd": {"average": "ax"},
    "rprop": {"previous_gradient": "prev", "step_size": "step_size"},
}


def torch_states(make: Callable[..., Any], options: dict[str, Any], slots: dict[str, str]) -> list[Arrays]:
    """The state of PyTorch's optimizer after each step, in float64, under our names."""
    torch.set_default_dtype(torch.float64)
    try:
        initial, gradients = random_problem("float64")
        parameters = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in initial.items()}
        optimizer = make(list(parameters.values()), lr=LR, **options)
        history = []
        for step_gradients in gradients:
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(step_gradients[name].copy())
            optimizer.step()
            history.append(
                {
                    f"opt/{ours}/{name}": optimizer.state[parameter][theirs].numpy().copy()
                    for ours, theirs in slots.items()
                    for name, parameter in parameters.items()
                }
            )
        return history
    finally:
        torch.set_default_dtype(torch.float32)


@every_case
def test_matches_torch_in_float64(name: str, torch_optimizer: Callable[..., Any], options: dict[str, Any]) -> None:
    """Parameters and state, over fifty steps."""
    actual = run_random_problem(optim.OPTIMIZERS[name](lr=LR, **options), "float64")
    assert len(actual) == STEPS == 50
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float64"), rtol=1e-10, atol=1e-12)
    assert_same_history(actual, torch_states(torch_optimizer, options, SLOTS[name]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "torch_optimizer", "options"), [*CASES[::5], CASES[-6], CASES[-1]])
def test_float32_stays_near_float64(name: str, torch_optimizer: Callable[..., Any], options: dict[str, Any]) -> None:
    actual = run_random_problem(optim.OPTIMIZERS[name](lr=LR, **options), "float32")
    assert_same_history(actual, torch_steps(torch_optimizer, options, "float32"), rtol=2e-5, atol=2e-5)


def test_the_average_is_the_parameters_until_it_begins() -> None:
    history = run_random_problem(optim.asgd(lr=LR, t0=10), "float64")
    for step, state in enumerate(history):
        is_same = all(np.array_equal(state[f"opt/average/{name}"], state[f"param/{name}"]) for name in SHAPES)
        assert is_same == (step < 12), step


def test_the_rate_of_averaged_descent_is_that_of_the_step() -> None:
    """PyTorch's eta is computed a step ahead, and would follow a changed rate one step later."""
    initial, gradients = random_problem("float64")

    def rate(step: int) -> float:
        return LR * 2.0 ** -(step // 5)

    history = run_steps(optim.asgd(lr=LR, lambd=0.5), initial, lambda step, _: gradients[step], 12, rate)
    expected = dict(initial)
    for step in range(12):
        eta = rate(step) / (1 + 0.5 * rate(step) * step) ** 0.75
        expected = {name: array * (1 - 0.5 * eta) - eta * gradients[step][name] for name, array in expected.items()}
        for name, array in expected.items():
            np.testing.assert_allclose(history[step][f"param/{name}"], array, rtol=1e-10)


def test_later_rates_multiply_the_steps_of_rprop() -> None:
    initial, gradients = random_problem("float64")
    plain, halved = (
        run_steps(optim.rprop(lr=LR), initial, lambda step, _: gradients[step], 12, rate)
        for rate in (lambda _: LR, lambda step: LR if step < 6 else LR / 2)
    )
    for name, first in initial.items():
        ours, theirs = ([first, *(state[f"param/{name}"] for state in history)] for history in (halved, plain))
        for step in range(12):
            moved, expected = ours[step + 1] - ours[step], theirs[step + 1] - theirs[step]
            np.testing.assert_allclose(moved, expected if step < 6 else expected / 2, rtol=1e-9, atol=1e-14)
        np.testing.assert_array_equal(halved[-1][f"opt/step_size/{name}"], plain[-1][f"opt/step_size/{name}"])


@pytest.mark.parametrize("first", [0.0, 1e-12])
def test_a_first_rate_below_the_smallest_step_size_makes_no_later_step_larger(first: float) -> None:
    """A warm-up may begin at nothing: the steps are then those of the smallest step size, by the rate's share of it."""
    initial, gradients = random_problem("float64")
    rates = [first, *[LR] * 5]
    history = run_steps(optim.rprop(lr=LR), initial, lambda step, _: gradients[step], 6, lambda step: rates[step])
    for name, array in initial.items():
        np.testing.assert_allclose(history[0][f"param/{name}"], array, atol=1.01 * first)
        states = [history[step] for step in range(6)]
        for before, after in itertools.pairwise(states):
            assert np.abs(after[f"param/{name}"] - before[f"param/{name}"]).max() <= LR * 1.2**5 * (1 + 1e-9)


def test_signs_of_gradients_whose_product_vanishes() -> None:
    """1e-30 squared is 0 in float32, and so is PyTorch's sign of it."""
    graphs = UpdateGraph(optim.rprop(lr=LR), {"w": (3,)}, "float32")
    state = graphs.first_state({"w": np.zeros(3, np.float32)})
    sizes = []
    for step, gradient in enumerate(([1e-30, -1e-30, 1e-30], [1e-30, -1e-30, -1e-30])):
        feeds = {"grad:w": np.array(gradient, np.float32), "lr": np.float32(LR), "step": np.int64(step)}
        results = graphs.apply.run(**state, **feeds)
        state = {name.removeprefix("next:"): array for name, array in results.items()}
        sizes.append(state["opt/step_size/w"])
    np.testing.assert_allclose(sizes[1] / sizes[0], [1.2, 1.2, 0.5], rtol=1e-6)


BATCH = {"x": np.random.default_rng(0).standard_normal((8, 1, 4, 4)).astype(np.float32), "labels": np.arange(8) % 3}


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    model = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))
    return burnish.compile(model, optimizer=optim.asgd(lr=0.1, t0=1), norm="frozen")


@pytest.mark.slow
def test_the_average_is_evaluated_and_exported(program: burnish.Program, tmp_path: Path) -> None:
    with burnish.Session(program, engine="onnxruntime") as session:
        for _ in range(6):
            session.step(BATCH)
        state = session.state()
        session.export(tmp_path / "averaged.onnx", fold_norm=False, parameters="average")
        assert session.evaluate(BATCH, parameters="average")["loss"] != session.evaluate(BATCH)["loss"]
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / "averaged.onnx").graph.initializer}
    np.testing.assert_array_equal(tensors["classifier.weight"], state["opt/average/classifier.weight"])
    assert not np.array_equal(tensors["classifier.weight"], state["param/classifier.weight"])


def test_a_state_of_another_optimizer_starts_the_average_anew(program: burnish.Program) -> None:
    """The average weighs its values by the step, which therefore starts anew with it."""
    with burnish.Session(program.with_optimizer("sgd"), engine="onnxruntime") as session:
        for _ in range(4):
            session.step(BATCH)
        carried = program.carry_state(session.state())
    assert carried.state["step"] == 0
    assert carried.fresh["step"] == "the optimizer's state does ('opt/average/classifier.weight')"
    np.testing.assert_array_equal(carried.state["opt/average/classifier.bias"], carried.state["param/classifier.bias"])
    averaged = program.with_optimizer(optim.ema(optim.sgd(), 0.5)).carry_state(carried.state | {"step": np.asarray(4)})
    assert averaged.state["step"] == 4


@pytest.mark.parametrize(
    "wrap",
    [
        optim.ema,
        optim.swa,
        lambda inside: optim.ema(optim.accumulate(inside, 2)),
        lambda inside: optim.swa(optim.groups(inside, {"a": "frozen"})),
        lambda inside: optim.ema(optim.groups(optim.sgd(), {"a": inside})),
        lambda inside: optim.ema(optim.chain(optim.clip_by_norm(1.0), inside)),
    ],
)
def test_no_second_average(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"^(ema|swa): the optimizer inside keeps an average of the parameters itself"):
        wrap(optim.asgd())
    wrap(optim.sgd())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (optim.asgd, {"lr": -1.0}, r"asgd: lr must be a finite number that is not negative"),
        (optim.asgd, {"lambd": -1.0}, r"asgd: lambd must be a finite number that is not negative, not -1\.0"),
        (optim.asgd, {"alpha": float("nan")}, r"asgd: alpha must be"),
        (optim.asgd, {"t0": -1}, r"asgd: t0 must be"),
        (optim.asgd, {"weight_decay": "x"}, r"asgd: weight_decay must be"),
        (optim.rprop, {"lr": schedules.cosine}, r"rprop: lr must be"),
        (optim.rprop, {"etas": 0.5}, r"rprop: etas must be two numbers, not 0\.5"),
        (
            optim.rprop,
            {"etas": (0.5, 1.0)},
            r"rprop: etas must be a factor between 0 and 1, where the sign changes, and one",
        ),
        (optim.rprop, {"etas": (0.0, 1.2)}, r"rprop: etas must be a factor between 0 and 1"),
        (optim.rprop, {"etas": (0.5, float("inf"))}, r"rprop: etas\[1\] must be a finite number"),
        (optim.rprop, {"step_sizes": (0.0, 1.0)}, r"rprop: step_sizes\[0\] must be a finite number above 0"),
        (
            optim.rprop,
            {"step_sizes": (1.0, 0.5)},
            r"rprop: step_sizes must be the smallest and the largest one, not \(1",
        ),
        (optim.rprop, {"step_sizes": (1.0,)}, r"rprop: step_sizes must be two numbers"),
    ],
)
def test_wrong_settings(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)
