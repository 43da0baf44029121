"""Optimizers that look at a whole layer, by optax and PyTorch in float64, step for step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch

from burnish import optim
from oracles.optimizers import STEPS, Arrays, run_steps

# Matrices both ways, a kernel of a convolution, and parameters that are no matrices, one of which starts at zero.
LAYERS: dict[str, tuple[int, ...]] = {
    "wide": (3, 5),
    "tall": (6, 2),
    "kernel": (4, 3, 2, 2),
    "bias": (4,),
    "zero": (3,),
    "scale": (),
}
MATRICES = ("wide", "tall")

# What JAX compiles here runs for a millisecond.
jax.config.update("jax_disable_most_optimizations", True)


@functools.cache
def layers_problem(dtype: str) -> tuple[Arrays, list[Arrays]]:
    """Parameters of the shapes ``LAYERS``, and gradients of 50 steps over three orders of magnitude; one of them all zero."""
    rng = np.random.default_rng(11)
    initial = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in LAYERS.items()}
    initial["zero"] = np.zeros(LAYERS["zero"], dtype)
    gradients = [
        {
            name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 1, shape), dtype)
            for name, shape in LAYERS.items()
        }
        for _ in range(STEPS)
    ]
    gradients[7] = {name: np.zeros(shape, dtype) for name, shape in LAYERS.items()}
    return initial, gradients


def run_layers(optimizer: optim.Optimizer, dtype: str) -> list[Arrays]:
    """The whole state after each step of ``layers_problem``."""
    initial, gradients = layers_problem(dtype)
    return run_steps(optimizer, initial, lambda step, _: gradients[step], STEPS)


def optax_layers(transformation: optax.GradientTransformation, dtype: str) -> list[Arrays]:
    """The parameters after each step of an optax optimizer, in float64, over the numbers of ``layers_problem(dtype)``."""
    initial, gradients = layers_problem(dtype)
    # For this block only: JAX computes in float32 otherwise, and other code may rely on it.
    with jax.enable_x64(True):
        update = jax.jit(transformation.update)
        parameters = {name: jax.numpy.asarray(array, np.float64) for name, array in initial.items()}
        state = transformation.init(parameters)
        history = []
        for step_gradients in gradients:
            step_gradients = {name: jax.numpy.asarray(array, np.float64) for name, array in step_gradients.items()}
            updates, state = update(step_gradients, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            history.append({f"param/{name}": np.asarray(array) for name, array in parameters.items()})
    assert all(array.dtype == np.float64 for array in history[-1].values())
    return history


def torch_layers(
    makers: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]], dtype: str
) -> tuple[list[Arrays], dict[str, dict[str, Any]]]:
    """Parameters after each step and the last state, in float64, of PyTorch's optimizers, one for each parameter that is named.

    A kernel is given to them as its matrix where a maker is named ``<parameter>:matrix``.
    """
    initial, gradients = layers_problem(dtype)
    parameters, optimizers = {}, {}
    for key, make in makers.items():
        name, _, form = key.partition(":")
        array = np.array(initial[name], np.float64)
        parameters[name] = torch.from_numpy(array.reshape(len(array), -1) if form else array).requires_grad_()
        optimizers[name] = make([parameters[name]])
    history = []
    for step_gradients in gradients:
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(np.array(step_gradients[name], np.float64)).reshape(parameter.shape)
            optimizers[name].step()
        history.append(
            {f"param/{name}": parameter.detach().numpy().copy().reshape(LAYERS[name]) for name, parameter in parameters.items()}
        )
    return history, {name: optimizer.state[parameters[name]] for name, optimizer in optimizers.items()}


def matrices_only(tree: dict[str, Any]) -> dict[str, bool]:
    """The mask of optax that leaves out what has fewer than two dimensions."""
    return {name: len(LAYERS[name]) > 1 for name in tree}


def optax_lamb(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adapt_vectors: bool
) -> optax.GradientTransformation:
    """``optax.lamb``; without vectors the same pieces, as its mask leaves out the decay alone."""
    if adapt_vectors:
        return optax.lamb(lr, *betas, eps=eps, weight_decay=weight_decay)
    return optax.chain(
        optax.scale_by_adam(*betas, eps=eps),
        optax.add_decayed_weights(weight_decay, matrices_only),
        optax.masked(optax.scale_by_trust_ratio(), matrices_only),
        optax.scale_by_learning_rate(lr),
    )


def optax_lars(
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    adapt_vectors: bool,
) -> optax.GradientTransformation:
    """``optax.lars``."""
    mask = True if adapt_vectors else matrices_only
    return optax.lars(lr, weight_decay, mask, trust_coefficient, eps, mask, momentum, nesterov)


def newton_schulz_of_singular_values(matrix: np.ndarray, coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    """What the iteration of Muon gives, in closed form: the polynomial acts on each singular value by itself."""
    left, values, right = np.linalg.svd(np.asarray(matrix, np.float64) / np.linalg.norm(matrix), full_matrices=False)
    c0, c1, c2 = coefficients
    for _ in range(steps):
        values = c0 * values + c1 * values**3 + c2 * values**5
    return (left * values) @ right
