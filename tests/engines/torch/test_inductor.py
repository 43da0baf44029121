"""Whole graphs compiled by Inductor give what the uncompiled ones give, and are compiled once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import burnish
from burnish.analysis.memory_plan import RECOMPUTES_METADATA
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.runtime.inductor import laid_out_as
from burnish.errors import EngineError, NonFiniteLossError
from burnish.models import residual_network
from oracles.open_program import open_program
from oracles.small_networks import perceptron
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program

pytestmark = pytest.mark.usefixtures("inductor")


def with_lr(batch):
    return {**batch, "lr": np.float32(LR)}


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
def test_a_residual_network_trains_and_evaluates_as_uncompiled():
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=burnish.optim.sgd(lr=0.05, momentum=0.9))
    compiled, plain = (burnish.Session(program, TorchEngine(compile=kind), threads=1) for kind in ("inductor", "none"))
    rng = np.random.default_rng(0)
    for size in (4, 6, 4):
        batch = {"x": rng.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, size)}
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
def test_activations_are_computed_again_and_not_merged_with_what_they_are_copies_of():
    plain, again = (
        burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd:lr=0.05", recompute=recompute)
        for recompute in (None, "layers")
    )
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, 4)}
    losses, states, convolutions = [], [], []
    for program in (plain, again):
        with burnish.Session(program, TorchEngine(compile="inductor"), threads=1) as session:
            report, code = run_and_get_code(session.step, batch)
            losses.append([report["loss"], session.step(batch)["loss"]])
            states.append(session.state())
            convolutions.append("".join(code).count("extern_kernels.convolution("))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    copies = [node for node in again.step.graph if node.op_type == "Conv" and node.metadata_props.get(RECOMPUTES_METADATA)]
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
