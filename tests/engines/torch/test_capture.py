"""The recorded step: everything but the CUDA graph itself, which a recorder that runs the function again stands in for."""

from __future__ import annotations

import logging

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import TorchEngine
from burnish.engines.torch.runtime import capture
from burnish.engines.torch.runtime.capture import CaptureError, CudaRecorder, RecordedStep, pack, unpack
from burnish.engines.torch.runtime.devices import tensor_float
from burnish.errors import EngineError, NonFiniteLossError
from burnish.program import Entry, GraphSignature, Role
from oracles.open_program import open_program
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program


class RunAgain:
    """Records by running: a replay computes from the fixed inputs into the fixed outputs, as a CUDA graph does."""

    def __init__(self):
        self.recorded = 0

    def record(self, function):
        self.recorded += 1
        with torch.inference_mode():
            outputs = tuple(tensor.clone() for tensor in function())
        return Replay(function, outputs)


class Replay:
    def __init__(self, function, outputs):
        self.function, self.outputs = function, outputs

    def replay(self):
        with torch.inference_mode():
            for fixed, tensor in zip(self.outputs, self.function(), strict=True):
                fixed.copy_(tensor)


class Refuses:
    def __init__(self):
        self.asked = 0

    def record(self, function):
        self.asked += 1
        raise CaptureError("operation not permitted when stream is capturing")


def opened(recorder, program, **options):
    runner = open_program(TorchEngine(**options), program, program.initial_state(0), threads=1)
    runner._recorder = recorder
    return runner


def with_lr(batch, lr=LR):
    return {**batch, "lr": np.float32(lr)}


@pytest.mark.slow
def test_recorded_steps_follow_the_closed_form_with_one_recording_per_shape():
    program, recorder = tiny_program(), RunAgain()
    runner = opened(recorder, program)
    places = {name: tensor.data_ptr() for name, tensor in runner._state.items()}
    state = program.initial_state(0)
    for number, size in enumerate((8, 5, 8, 1, 8, 5)):
        batch = tiny_batch(size, seed=number)
        rate = LR / (number + 1)
        outputs = runner.step(with_lr(batch, rate))
        loss, state = numpy_step(state, batch, rate)
        assert set(outputs) == {"loss", "accuracy"}
        assert outputs["loss"].dtype == np.float32
        assert outputs["loss"].shape == ()
        np.testing.assert_allclose(outputs["loss"], loss, rtol=2e-6)
        for name, array in state.items():
            np.testing.assert_allclose(runner.state()[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
    assert recorder.recorded == 3
    assert {name: tensor.data_ptr() for name, tensor in runner._state.items()} == places


def test_a_non_finite_loss_is_not_committed_and_a_loaded_state_is_what_the_recording_reads():
    program = tiny_program()
    runner = opened(RunAgain(), program)
    runner.step(with_lr(tiny_batch(seed=1)))
    before = runner.state()
    broken = tiny_batch(seed=2)
    broken["x"][0, 0] = np.inf
    with pytest.raises(NonFiniteLossError, match=r"The loss at step 1 is nan"):
        runner.step(with_lr(broken))
    for name, array in runner.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    start = program.initial_state(0)
    runner.load_state(start)
    loss, state = numpy_step(start, tiny_batch(seed=3))
    np.testing.assert_allclose(runner.step(with_lr(tiny_batch(seed=3)))["loss"], loss, rtol=2e-6)
    for name, array in state.items():
        np.testing.assert_allclose(runner.state()[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
    assert runner.evaluate(tiny_batch(6))["count:accuracy"] == 6


def test_a_failing_step_is_named_and_the_next_one_runs():
    program = tiny_program()
    runner = opened(RunAgain(), program)
    with pytest.raises(EngineError, match=r"failed in the step graph.*No state has changed"):
        runner.step(with_lr({**tiny_batch(8), "labels": np.zeros(7, np.int64)}))
    loss, _ = numpy_step(program.initial_state(0), tiny_batch())
    np.testing.assert_allclose(runner.step(with_lr(tiny_batch()))["loss"], loss, rtol=2e-6)


def test_a_step_that_cannot_be_recorded_runs_unrecorded_and_says_so_once(caplog):
    program, recorder = tiny_program(), Refuses()
    runner = opened(recorder, program)
    state = program.initial_state(0)
    with caplog.at_level(logging.WARNING, "burnish"):
        for number in range(3):
            batch = tiny_batch(8, seed=number)
            loss, state = numpy_step(state, batch)
            np.testing.assert_allclose(runner.step(with_lr(batch))["loss"], loss, rtol=2e-6)
    assert recorder.asked == 1
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "burnish: the step cannot be recorded as one CUDA graph (operation not permitted when stream is capturing)"
    ]
    for name, array in state.items():
        np.testing.assert_allclose(runner.state()[name], array, rtol=2e-6, atol=2e-6, err_msg=name)


def test_the_shape_used_least_recently_makes_room(monkeypatch):
    monkeypatch.setattr(capture, "KEPT_RECORDINGS", 2)
    recorder = RunAgain()
    runner = opened(recorder, tiny_program())
    for size, recorded in ((4, 1), (5, 2), (4, 2), (6, 3), (4, 3), (5, 4)):
        runner.step(with_lr(tiny_batch(size)))
        assert recorder.recorded == recorded


def scalar(name, role, updates=None):
    return Entry(name, role, ir.DataType.FLOAT, (2,), updates=updates)


@pytest.mark.parametrize("recorder", [RunAgain, Refuses])
def test_a_state_entry_that_takes_over_another_gets_it_from_before_the_step(recorder):
    signature = GraphSignature(
        (scalar("param/new", Role.PARAMETER), scalar("opt/old", Role.OPTIMIZER), scalar("x", Role.DATA)),
        (
            scalar("next:param/new", Role.PARAMETER, "param/new"),
            scalar("next:opt/old", Role.OPTIMIZER, "opt/old"),
            scalar("loss", Role.LOSS),
        ),
    )
    state = {"param/new": torch.tensor([1.0, 2.0]), "opt/old": torch.tensor([5.0, 6.0])}
    step = RecordedStep(
        lambda new, old, x: (new + x, new, new.sum()), signature, state, torch.device("cpu"), lambda tensor: tensor, recorder()
    )
    for x in (10.0, 100.0):
        assert step.run({"x": np.full(2, x, np.float32)})["loss"] == state["param/new"].sum()
        step.commit()
    assert state["param/new"].tolist() == [111.0, 112.0]
    assert state["opt/old"].tolist() == [11.0, 12.0]


def test_what_is_reported_comes_back_with_its_bits():
    dtypes = [
        ir.DataType.FLOAT,
        ir.DataType.BFLOAT16,
        ir.DataType.BOOL,
        ir.DataType.INT64,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
    ]
    tensors = [
        torch.tensor(1 / 3),
        torch.tensor([1.5, -3.0], dtype=torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.tensor([[2**62 + 1]]),
        torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t(),
        torch.zeros(0, dtype=torch.float16),
    ]
    entries = [Entry(f"{index}", Role.METRIC, dtype, None) for index, dtype in enumerate(dtypes)]
    arrays = unpack(pack(tensors), entries, [tensor.shape for tensor in tensors])
    assert arrays["0"] == np.float32(1 / 3)
    assert arrays["1"].dtype == ml_dtypes.bfloat16
    for entry, tensor in zip(entries, tensors, strict=True):
        array = arrays[entry.name]
        assert array.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(array.astype(np.float64), tensor.double().numpy())
    assert arrays["3"].item() == 2**62 + 1


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_tf32_is_put_back(enabled):
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    within = []

    def fail():
        with tensor_float(enabled):
            within.extend(backend.allow_tf32 for backend in backends)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within == [enabled, enabled]
    assert [backend.allow_tf32 for backend in backends] == before


@pytest.mark.parametrize(
    ("options", "tf32", "measured"), [({}, False, True), ({"kernel_choice": "fixed", "tf32": True}, True, False)]
)
def test_graphs_on_a_gpu_run_under_their_settings(options, tf32, measured, monkeypatch):
    program = tiny_program()
    runner = open_program(TorchEngine(**options), program, program.initial_state(0))
    monkeypatch.setattr(runner, "_device", torch.device("cuda"))
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", not measured)
    with runner._settings():
        assert (cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, cudnn.benchmark) == (tf32, tf32, measured)
    assert cudnn.benchmark is not measured


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA GPU")
    program = tiny_program()
    with pytest.raises(EngineError, match=r"cannot use the device 'cuda': .*Leave device out for the CPU"):
        open_program(TorchEngine(), program, program.initial_state(0), device="cuda")


@pytest.mark.parametrize("compile", ["regions", "none", "inductor"])
def test_steps_on_a_gpu_follow_the_closed_form(cuda, compile):
    program = tiny_program()
    runner = open_program(TorchEngine(compile=compile), program, program.initial_state(0), device="cuda")
    assert isinstance(runner._recorder, CudaRecorder)
    state = program.initial_state(0)
    for number, size in enumerate((8, 5, 8, 1)):
        batch = tiny_batch(size, seed=number)
        loss, state = numpy_step(state, batch)
        np.testing.assert_allclose(runner.step(with_lr(batch))["loss"], loss, rtol=1e-5)
    assert not runner._recorded._refused
    for name, array in state.items():
        np.testing.assert_allclose(runner.state()[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
