"""Whole graphs compiled by Inductor give what the uncompiled ones give, and are compiled once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.runtime.inductor import laid_out_as
from burnish.errors import EngineError, NonFiniteLossError
from burnish.graph.annotations import RECOMPUTES
from burnish.models import residual_network
from oracles.open_program import open_program
from oracles.small_networks import perceptron
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program

pytestmark = pytest.mark.usefixtures("inductor")


def with_lr(batch):
    return {**batch, "lr": np.float32(LR)}


def images(rng, size):
    return {"x": rng.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, size)}


@dataclass
class Residual:
    """A residual network whose step Inductor has compiled: its session has gone one step from the initial state.

    Attributes:
        batch: of that step.
        loss: what it reported.
        code: what Inductor wrote.
    """

    program: burnish.Program
    session: burnish.Session
    batch: dict[str, np.ndarray]
    loss: float
    code: str

    @classmethod
    def compiled(cls, recompute=None):
        optimizer = burnish.optim.sgd(lr=0.05, momentum=0.9)
        program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=optimizer, recompute=recompute)
        session, batch = burnish.Session(program, TorchEngine(compile="inductor"), threads=1), images(np.random.default_rng(0), 4)
        report, code = run_and_get_code(session.step, batch)
        return cls(program, session, batch, report["loss"], "".join(code))


@pytest.fixture(scope="module")
def residual():
    return Residual.compiled()


@pytest.mark.slow
def test_steps_follow_the_closed_form_and_other_batch_sizes_compile_nothing():
    program = tiny_program()
    runner = open_program(TorchEngine(compile="inductor"), program, program.initial_state(0))
    state = program.initial_state(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number, size in enumerate((8, 8, 5, 2, 64)):
            batch = tiny_batch(size, seed=number)
            outputs = runner.step(with_lr(batch))
            loss, state = numpy_step(state, batch)
            np.testing.assert_allclose(outputs["loss"], loss, rtol=2e-6)
    for name, array in state.items():
        np.testing.assert_allclose(runner.state()[name], array, rtol=5e-6, atol=2e-6, err_msg=name)

    before = runner.state()
    broken = tiny_batch(8, seed=2)
    broken["x"][3, 1] = np.nan
    with pytest.raises(NonFiniteLossError, match=r"The loss at step 5 is nan"):
        runner.step(with_lr(broken))
    with pytest.raises(EngineError, match=r"failed in the step graph"):
        runner.step(with_lr({**tiny_batch(8), "labels": np.zeros(7, np.int64)}))
    for name, array in runner.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)

    single = tiny_batch(1, seed=9)
    loss, _ = numpy_step(before, single)
    np.testing.assert_allclose(runner.step(with_lr(single))["loss"], loss, rtol=2e-6)


@pytest.mark.slow
def test_a_residual_network_trains_and_evaluates_as_uncompiled(residual):
    program, compiled = residual.program, residual.session
    compiled.load_state(program.initial_state(0))
    plain = burnish.Session(program, TorchEngine(compile="none"), threads=1)
    rng = np.random.default_rng(0)
    for size in (4, 6, 4):
        batch = images(rng, size)
        assert compiled.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], rel=2e-5)
    expected = plain.state()
    for name, array in compiled.state().items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4 * np.abs(expected[name]).max(), err_msg=name)
    assert compiled.evaluate(batch)["loss"] == pytest.approx(plain.evaluate(batch)["loss"], rel=1e-4)
    # Statistics keep their digits where the mean is large: the compiler reorders nothing.
    shifted = {**batch, "x": batch["x"] + np.float32(1000)}
    for session in (compiled, plain):
        session.load_state(program.initial_state(0))
    assert compiled.step(shifted)["loss"] == pytest.approx(plain.step(shifted)["loss"], rel=1e-5)
    expected = plain.state()
    for name in (name for name in expected if name.startswith("opt/")):
        np.testing.assert_allclose(compiled.state()[name], expected[name], atol=1e-4 * np.abs(expected[name]).max(), err_msg=name)


@pytest.mark.slow
def test_activations_are_computed_again_and_not_merged_with_what_they_are_copies_of(residual):
    again = Residual.compiled(recompute="layers")
    losses, states = [], []
    for each in (residual, again):
        each.session.load_state(each.program.initial_state(0))
        losses.append([each.loss, *(each.session.step(each.batch)["loss"] for _ in range(2))])
        states.append(each.session.state())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    copies = [node for node in again.program.step.graph if node.op_type == "Conv" and RECOMPUTES.get(node)]
    convolutions = [each.code.count("extern_kernels.convolution(") for each in (residual, again)]
    assert convolutions[1] - convolutions[0] == len(copies) > 0


@pytest.mark.slow
def test_dropout_draws_the_same_masks():
    program = burnish.compile(perceptron(dropout=True), optimizer="sgd")
    compiled, plain = (burnish.Session(program, TorchEngine(compile=kind), threads=1) for kind in ("inductor", "none"))
    rng = np.random.default_rng(0)
    for size in (4, 6):
        batch = {"x": rng.normal(size=(size, 12)).astype(np.float32), "labels": rng.integers(0, 3, size)}
        assert compiled.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], rel=1e-5)
    np.testing.assert_array_equal(compiled.state()["rng/key"], plain.state()["rng/key"])


def test_a_missing_compiler_is_named():
    program = tiny_program()
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(EngineError, match=r"compile='inductor' needs a C\+\+ compiler, and none was found: install one"),
    ):
        open_program(TorchEngine(compile="inductor"), program, program.initial_state(0))


@pytest.mark.slow
def test_what_the_compiler_refuses_is_named(monkeypatch):
    def refuse(*arguments, **options):
        raise NotImplementedError("no such loop")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    program = tiny_program()
    runner = open_program(TorchEngine(compile="inductor"), program, program.initial_state(0))
    with pytest.raises(
        EngineError, match=r"cannot compile the step graph: .*no such loop.*No state has changed\. Leave compile="
    ):
        runner.step(with_lr(tiny_batch()))


def test_an_unknown_compilation_is_refused():
    with pytest.raises(EngineError, match=r"compile='all': the torch engine compiles one of 'regions', 'inductor', 'none'"):
        TorchEngine(compile="all")


def test_a_layout_is_kept_without_a_copy_where_it_addresses_the_same_memory():
    like = torch.empty_strided((5, 3, 1, 1), (3, 1, 3, 3))
    single = torch.arange(15.0).reshape(5, 3, 1, 1)
    kept = laid_out_as(single, like)
    assert kept.stride() == like.stride()
    assert kept.data_ptr() == single.data_ptr()
    image = torch.arange(120.0).reshape(2, 3, 4, 5)
    turned = laid_out_as(image, image.contiguous(memory_format=torch.channels_last))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(turned, image)
