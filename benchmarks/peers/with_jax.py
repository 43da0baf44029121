"""Contender: JAX, one jitted step with donated state. Started by ``compare.py`` in an environment of its own."""

from __future__ import annotations

import functools
from typing import Any

from job import endless, read_batches, read_job, use_cores

JOB = read_job()
use_cores(JOB["threads"])  # before JAX makes its threads

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from contenders import Step, serve  # noqa: E402
from jax_models import MODELS, Layers, Parameters, Statistics  # noqa: E402

State = dict[str, Parameters]


def initial_state() -> State:
    with np.load(JOB["arrays"]) as arrays:
        tensors = {name: arrays[name] for name in arrays.files if not name.endswith("num_batches_tracked")}
    parameters = {
        name: jnp.asarray(np.moveaxis(array, (1, 0), (-2, -1)) if array.ndim > 2 else array)
        for name, array in tensors.items()
        if "running_" not in name
    }
    running = {name: jnp.asarray(array) for name, array in tensors.items() if "running_" in name}
    slots = {"first": {name: jnp.zeros_like(value) for name, value in parameters.items()}}
    if JOB["optimizer"]["name"] == "adamw":
        slots |= {"second": {name: jnp.zeros_like(value) for name, value in parameters.items()}, "step": {"": jnp.zeros(())}}
    return {"parameters": parameters, "running": running, **slots}


def loss_of(parameters: Parameters, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Statistics]:
    layers = Layers(parameters)
    logits = jax.nn.log_softmax(MODELS[JOB["model"]](layers, x))
    return -jnp.take_along_axis(logits, labels[..., None], -1).mean(), layers.statistics


@functools.partial(jax.jit, donate_argnums=0)
def train(state: State, x: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["parameters"], x, labels)
    options = JOB["optimizer"]
    new = dict(state)
    if options["name"] == "sgd":
        new["first"] = jax.tree.map(lambda slot, g: options["momentum"] * slot + g, state["first"], gradients)
        new["parameters"] = jax.tree.map(lambda p, slot: p - options["lr"] * slot, state["parameters"], new["first"])
    else:
        beta1, beta2 = options["betas"]
        step = state["step"][""] + 1
        new["step"] = {"": step}
        new["first"] = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["first"], gradients)
        new["second"] = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state["second"], gradients)
        new["parameters"] = jax.tree.map(
            lambda p, m, v: (
                p * (1 - options["lr"] * options["weight_decay"])
                - options["lr"] * (m / (1 - beta1**step)) / (jnp.sqrt(v / (1 - beta2**step)) + options["eps"])
            ),
            state["parameters"],
            new["first"],
            new["second"],
        )
    new["running"] = dict(state["running"])
    for layer, figures in statistics.items():
        for name, figure in zip(("running_mean", "running_var"), figures, strict=True):
            new["running"][f"{layer}.{name}"] = 0.9 * state["running"][f"{layer}.{name}"] + 0.1 * figure
    return new, loss


def main() -> None:
    batches = endless([(np.moveaxis(x, 1, -1).copy() if x.ndim > 2 else x, labels) for x, labels in read_batches(JOB)])

    def build() -> tuple[Step, dict[str, Any]]:
        state = initial_state()

        def step() -> float:
            nonlocal state
            state, loss = train(state, *next(batches))
            return float(loss)

        return step, {"versions": {"jax": jax.__version__}}

    serve(build)


if __name__ == "__main__":
    main()
