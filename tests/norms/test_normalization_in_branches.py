"""Batch normalization that trains in the branches of an If: beside the same in PyTorch, where Python takes the branch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch

import burnish
from burnish.distributed.batch_normalization import effective_policies
from burnish.errors import ConfigurationError
from oracles.combinations import diagonal

HEAD = """<ir_version: 10, opset_import: ["": 18]>
g (double[N, 3] x, bool c, bool d) => (double[N, 3] y) <double[3, 3] w = {1, 0.2, 0.3, 1, 0.5, 0.6, 0.7, 0.8, 0.9},
    double[3] gamma = {1, 1.5, 2}, double[3] beta = {0.1, 0, -0.1}, double[3] mean = {0.1, 0.2, 0.3},
    double[3] variance = {1, 2, 3}, double[3] scale = {0.5, 1, 1.5}, double[3] shift = {0.2, 0, 0.1},
    double[3] center = {0, 0.1, 0}, double[3] spread = {2, 1, 1}> {
    m = MatMul (x, w)
"""
ONE = """h = If (c) <then_branch = t () => (double[N, 3] a) {
        k = BatchNormalization (m, gamma, beta, mean, variance) a = Tanh (k) },
        else_branch = e () => (double[N, 3] b) { b = Tanh (m) }>
    y = MatMul (h, w) }"""
SHARED = """h = If (c) <then_branch = t () => (double[N, 3] a) {
        k = BatchNormalization (m, gamma, beta, mean, variance)
        l = BatchNormalization (k, gamma, beta, mean, variance) a = Tanh (l) },
        else_branch = e () => (double[N, 3] b) { n = BatchNormalization (m, scale, shift, mean, variance) b = Sin (n) }>
    o = BatchNormalization (h, scale, shift, mean, variance)
    y = MatMul (o, w) }"""
NESTED = """h = If (c) <then_branch = t () => (double[N, 3] a) {
        k = If (d) <then_branch = u () => (double[N, 3] p) { p = BatchNormalization (m, gamma, beta, mean, variance) },
            else_branch = v () => (double[N, 3] q) { q = BatchNormalization (m, scale, shift, center, spread) }>
        a = Tanh (k) }, else_branch = e () => (double[N, 3] b) { b = BatchNormalization (m, gamma, beta, center, spread) }>
    y = MatMul (h, w) }"""
Tensors = dict[str, torch.Tensor]


def normalized(x: torch.Tensor, state: Tensors, scale: str, bias: str, mean: str, variance: str) -> torch.Tensor:
    """By statistics of the batch; the running ones retain 0.9, and take the population variance."""
    for name, statistic in ((mean, x.detach().mean(0)), (variance, x.detach().var(0, unbiased=False))):
        state[name] = 0.9 * state[name] + 0.1 * statistic
    return torch.nn.functional.batch_norm(x, None, None, state[scale], state[bias], training=True, eps=float(np.float32(1e-5)))


def one(m: torch.Tensor, state: Tensors, c: bool, d: bool) -> torch.Tensor:
    return torch.tanh(normalized(m, state, "gamma", "beta", "mean", "variance") if c else m)


def shared(m: torch.Tensor, state: Tensors, c: bool, d: bool) -> torch.Tensor:
    statistics = ("mean", "variance")
    if c:
        k = normalized(m, state, "gamma", "beta", *statistics)
        h = torch.tanh(normalized(k, state, "gamma", "beta", *statistics))
    else:
        h = torch.sin(normalized(m, state, "scale", "shift", *statistics))
    return normalized(h, state, "scale", "shift", *statistics)


def nested(m: torch.Tensor, state: Tensors, c: bool, d: bool) -> torch.Tensor:
    if not c:
        return normalized(m, state, "gamma", "beta", "center", "spread")
    inner = ("gamma", "beta", "mean", "variance") if d else ("scale", "shift", "center", "spread")
    return torch.tanh(normalized(m, state, *inner))


MODELS: dict[str, tuple[str, Any]] = {"one": (ONE, one), "shared": (SHARED, shared), "nested": (NESTED, nested)}


def compiled(text: str, **options: Any) -> burnish.Program:
    return burnish.compile(onnx.parser.parse_model(HEAD + text), loss="mse", optimizer="sgd:lr=0.1", metrics=(), **options)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    taken = [(True, True), (False, True), (True, False), (True, True)]
    return [
        {**{name: rng.normal(size=(5, 3)) for name in ("x", "targets")}, "c": np.array(c), "d": np.array(d)} for c, d in taken
    ]


@diagonal(("name", MODELS), ("engine", ["onnxruntime", "torch", "reference"]), test=1)
def test_steps_are_pytorchs(name: str, engine: str) -> None:
    text, function = MODELS[name]
    program = compiled(text)
    state = {key.partition("/")[2]: torch.tensor(array) for key, array in program.initial_state().items() if "/" in key}
    trained = [key.partition("/")[2] for key in program.initial_state() if key.startswith("param/")]
    for key in trained:
        state[key].requires_grad_()
    with burnish.Session(program, engine=engine) as session:
        for batch in batches():
            m = torch.tensor(batch["x"]) @ state["w"]
            y = function(m, state, bool(batch["c"]), bool(batch["d"])) @ state["w"]
            loss = torch.nn.functional.mse_loss(y, torch.tensor(batch["targets"]))
            gradients = torch.autograd.grad(loss, [state[key] for key in trained], allow_unused=True)
            assert session.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-6)
            for key, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    state[key] = (state[key] - 0.1 * gradient).detach().requires_grad_()
        for key, array in session.state().items():
            if (known := key.partition("/")[2]) in state and key.startswith(("param/", "stat/")):
                np.testing.assert_allclose(array, state[known].detach(), rtol=1e-6, atol=1e-8, err_msg=key)


def test_an_export_has_the_statistics_of_the_branch(tmp_path) -> None:
    with burnish.Session(compiled(ONE), engine="torch") as session:
        for batch in batches():
            session.step(batch)
        session.export(tmp_path / "tuned.onnx")
        fed = {name: array for name, array in batches()[0].items() if name in ("x", "c", "d")}
        expected = session.predict(fed)["y"]
    tuned = burnish.Session(burnish.compile(tmp_path / "tuned.onnx", loss="mse", metrics=()), engine="reference")
    np.testing.assert_allclose(tuned.predict(fed)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("policy", ["renorm", burnish.norms.Train(momentum="cumulative")])
def test_a_policy_that_counts_steps_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'.*' is in a branch, and '.*' counts the steps in which it normalizes"):
        compiled(ONE, norm=policy)


def test_workers_refuse_it() -> None:
    graph = compiled(ONE).semantic["grad"].graph
    with pytest.raises(ConfigurationError, match=r"'.*' is in a branch, and workers cannot exchange its statistics"):
        effective_policies(graph, burnish.norms.Train(), 2)


def test_a_frozen_layer_keeps_its_statistics() -> None:
    with burnish.Session(compiled(ONE, norm="frozen")) as session:
        session.step(batches()[0])
        np.testing.assert_array_equal(session.state()["stat/mean"], [0.1, 0.2, 0.3])
