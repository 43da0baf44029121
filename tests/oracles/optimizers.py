"""Runs the graphs of an optimizer step for step on stock ONNX Runtime, beside PyTorch's optimizers in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish import optim
from burnish.graph import Tensor
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.small_graphs import Session, SmallGraph

Arrays = dict[str, np.ndarray]

SHAPES: dict[str, tuple[int, ...]] = {"weight": (3, 4), "bias": (4,), "scale": ()}
# Powers of two: the learning rate goes through a float32 input and is the same number in float64.
LR = 2.0**-6
STEPS = 50


class UpdateGraph:
    """The graphs init and apply of an optimizer over some parameters.

    Args:
        optimizer: the optimizer.
        shapes: parameter name -> extents.
        dtype: of every parameter, but those that ``dtypes`` names.
        known: False leaves every extent open.
        dtypes: parameter name -> dtype.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        shapes: dict[str, tuple[int, ...]],
        dtype: str,
        known: bool = True,
        dtypes: dict[str, str] | None = None,
    ):
        declared = {
            name: ((dtypes or {}).get(name, dtype), shape if known else [None] * len(shape)) for name, shape in shapes.items()
        }
        parameters = {f"param/{name}": entry for name, entry in declared.items()}
        self.initial = SmallGraph(parameters)
        slots = optimizer.init(self.initial.builder, {name: self.initial[f"param/{name}"] for name in shapes})
        for name, tensor in slots.items():
            self.initial.output(f"opt/{name}", tensor)
        slot_entries = {f"opt/{name}": _entry(tensor) for name, tensor in slots.items()}
        gradients = {f"grad:{name}": entry for name, entry in declared.items()}
        scalars = {"step": ("int64", ()), **{name: ("float32", ()) for name in optimizer.hyperparameters()}}
        self.apply = SmallGraph(parameters | gradients | slot_entries | scalars)
        self.next_params, self.next_state = optimizer.apply(
            optim.UpdateInputs(
                self.apply.builder,
                {name: self.apply[f"param/{name}"] for name in shapes},
                {name: self.apply[f"grad:{name}"] for name in shapes},
                {name: self.apply[f"opt/{name}"] for name in slots},
                self.apply["step"],
                {name: self.apply[name] for name in optimizer.hyperparameters()},
            )
        )
        assert list(self.next_params) == list(shapes)
        assert set(self.next_state) == set(slots)
        for name, tensor in self.next_params.items():
            self.apply.output(f"next:param/{name}", tensor)
        for name, tensor in self.next_state.items():
            self.apply.output(f"next:opt/{name}", tensor)
        lower_semantic_operators(ir.Model(self.apply.graph, ir_version=10))  # as a program's are

    def first_state(self, parameters: Arrays) -> Arrays:
        """Parameters and what ``init`` makes beside them."""
        state = {f"param/{name}": array for name, array in parameters.items()}
        return state | self.initial.run(**state) if self.initial.graph.outputs else state


def _entry(tensor: Tensor) -> tuple[str, list[int | None]]:
    assert tensor.shape is not None
    return tensor.dtype.numpy().name, [extent if isinstance(extent, int) else None for extent in tensor.shape.dims]


def next_state(results: Arrays) -> Arrays:
    """The outputs of apply under the names that its inputs have."""
    return {name.removeprefix("next:"): array for name, array in results.items()}


def run_steps(
    optimizer: optim.Optimizer,
    initial: Arrays,
    gradient: Callable[[int, Arrays], Arrays],
    steps: int,
    rate: Callable[[int], float] | None = None,
) -> list[Arrays]:
    """Run ``steps`` updates on ONNX Runtime; the whole state after each.

    Args:
        optimizer: the optimizer.
        initial: parameter name -> array; all of one dtype.
        gradient: (step, parameters) -> gradients by parameter name.
        steps: how many.
        rate: step -> learning rate; by default that of the optimizer.
    """
    dtype = str(next(iter(initial.values())).dtype)
    graphs = UpdateGraph(optimizer, {name: array.shape for name, array in initial.items()}, dtype)
    state = graphs.first_state(initial)
    session: Session = graphs.apply.session()
    history = []
    for step in range(steps):
        parameters = {name: state[f"param/{name}"] for name in initial}
        gradients = {f"grad:{name}": array for name, array in gradient(step, parameters).items()}
        hyperparameters = {name: np.float32(value) for name, value in optimizer.hyperparameters().items()}
        if rate is not None:
            hyperparameters["lr"] = np.float32(rate(step))
        state = next_state(session(**state, **gradients, **hyperparameters, step=np.int64(step)))
        history.append(state)
    return history


def run_random_problem(optimizer: optim.Optimizer, dtype: str) -> list[Arrays]:
    """The whole state after each step of ``random_problem``."""
    initial, gradients = random_problem(dtype)
    return run_steps(optimizer, initial, lambda step, _: gradients[step], STEPS)


@functools.cache
def random_problem(dtype: str) -> tuple[Arrays, list[Arrays]]:
    """Parameters, and gradients of 50 steps over six orders of magnitude."""
    rng = np.random.default_rng(3)
    initial = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in SHAPES.items()}
    gradients = [
        {
            name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-5, 1, shape), dtype)
            for name, shape in SHAPES.items()
        }
        for _ in range(STEPS)
    ]
    return initial, gradients


def torch_steps(make: Callable[..., Any], options: dict[str, Any], dtype: str) -> list[Arrays]:
    """The parameters after each step of PyTorch's optimizer, in float64, over the numbers of ``random_problem(dtype)``."""
    # NAdam keeps its product of momenta in PyTorch's default dtype, whatever that of the parameters is.
    torch.set_default_dtype(torch.float64)
    try:
        return _torch_steps(make, options, dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def _torch_steps(make: Callable[..., Any], options: dict[str, Any], dtype: str) -> list[Arrays]:
    initial, gradients = random_problem(dtype)
    parameters = {name: torch.from_numpy(np.array(array, np.float64)).requires_grad_() for name, array in initial.items()}
    optimizer = make(list(parameters.values()), **{"lr": LR, **options})
    history = []
    for step_gradients in gradients:
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(np.array(step_gradients[name], np.float64))
        optimizer.step()
        history.append({f"param/{name}": parameter.detach().numpy().copy() for name, parameter in parameters.items()})
    return history


def assert_same_history(actual: list[Arrays], expected: list[Arrays], rtol: float, atol: float) -> None:
    """Assert that every step has the arrays of ``expected``; ``actual`` may hold more beside them."""
    for ours, theirs in zip(actual, expected, strict=True):
        for key, array in theirs.items():
            np.testing.assert_allclose(ours[key], array, rtol=rtol, atol=atol, err_msg=key)


def parabola(optimizer: optim.Optimizer, steps: int, rate: Callable[[int], float] | None = None) -> np.ndarray:
    """The distance to the bottom of a parabola, by coordinate, after ``steps`` from the origin."""
    bottom, curvature = np.array([3.0, -2.0]), np.array([1.0, 5.0])

    def gradient(step: int, parameters: Arrays) -> Arrays:
        return {"w": curvature * (parameters["w"] - bottom)}

    return run_steps(optimizer, {"w": np.zeros(2)}, gradient, steps, rate)[-1]["param/w"] - bottom


def rosenbrock(optimizer: optim.Optimizer, steps: int, rate: Callable[[int], float] | None = None) -> float:
    """The height in the valley of Rosenbrock after ``steps`` from (-1.2, 1), whose height is 24.2."""

    def gradient(step: int, parameters: Arrays) -> Arrays:
        x, y = parameters["w"]
        return {"w": np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])}

    x, y = run_steps(optimizer, {"w": np.array([-1.2, 1.0])}, gradient, steps, rate)[-1]["param/w"]
    return float((1 - x) ** 2 + 100 * (y - x * x) ** 2)
