"""Runs that do not end: stopped by Ctrl-C and by a limit of time, with the state from before them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import pytest

import burnish
from burnish import stopping
from burnish.errors import ConfigurationError, EngineError
from burnish.training import Session, Trainer, TrainingInterrupted, read_checkpoint
from oracles.combinations import spread

ENDLESS = 1000.0
"""Of an input that is larger than 100, the loop of the model never ends."""
STEP_TIMEOUT = 1.0


@pytest.fixture(scope="module")
def program():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}, float zero = {0.0}, float one = {1.0}, float limit = {100.0}> {
  largest = ReduceMax <keepdims = 0> (x)
  go = Greater (largest, limit)
  s = Loop ("", go, zero) <body = body (int64 i, bool c, float a) => (bool co, float a2) { co = Identity(c) a2 = Add(a, one) }>
  m = MatMul(x, w)
  y = Add(m, s) }""")
    return burnish.compile(model, loss="mse", optimizer="sgd:lr=0.01")


def batch(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": np.full((2, 2), value, np.float32), "targets": np.ones((2, 2), np.float32)}


@pytest.fixture
def ctrl_c_in_a_run(monkeypatch, request):
    """Presses Ctrl-C, or sends another signal, as soon as a run is under way."""
    number = getattr(request, "param", signal.SIGINT)
    monkeypatch.setattr(stopping, "GRACE_SECONDS", 0.05)
    over = threading.Event()

    def press() -> None:
        while not over.wait(0.01):
            if stopping._under_way:
                os.kill(os.getpid(), number)
                return

    thread = threading.Thread(target=press)
    yield thread
    over.set()
    thread.join()


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_ctrl_c_stops_a_step_and_the_session_goes_on(program, engine, ctrl_c_in_a_run):
    session = Session(program, engine=engine)
    session.step(batch())
    state = session.state()
    ctrl_c_in_a_run.start()
    with pytest.raises(KeyboardInterrupt):
        session.step(batch(ENDLESS))
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, state[name])
    session.step(batch())
    assert session.step_count == 2


@pytest.mark.parametrize(
    ("engine", "ctrl_c_in_a_run"),
    [("onnxruntime", signal.SIGINT), ("reference", signal.SIGINT), ("onnxruntime", signal.SIGTERM)],
    indirect=["ctrl_c_in_a_run"],
)
def test_a_trainer_saves_the_state_from_before_the_step(program, engine, tmp_path, ctrl_c_in_a_run, request):
    data = {name: np.repeat(array, 4, axis=0) for name, array in batch(ENDLESS).items()}
    ctrl_c_in_a_run.start()
    trainer = Trainer(program, data, batch_size=2, run_directory=tmp_path, engine=engine, progress=False)
    with pytest.raises(TrainingInterrupted, match="Stopped in epoch 1 after 0 of its batches") as stopped:
        trainer.run()
    assert stopped.value.signal == request.node.callspec.params["ctrl_c_in_a_run"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert read_checkpoint(trainer.latest).step == 0


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_limit_of_time_names_step_and_graph_and_saves_the_state(program, engine, tmp_path):
    pytest.importorskip(engine)
    data = {name: np.repeat(array, 8, axis=0) for name, array in batch().items()}
    trainer = Trainer(
        program, data, batch_size=4, run_directory=tmp_path, engine=engine, step_timeout=STEP_TIMEOUT, progress=False
    )
    calls = []

    def endless_third(number: int, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(number)
        return batch(ENDLESS) if len(calls) == 3 else inputs

    whole = trainer.loader.epoch
    trainer.loader.epoch = lambda *place: (endless_third(number, inputs) for number, inputs in enumerate(whole(*place)))
    with pytest.raises(
        EngineError, match=r"The step graph did not end within step_timeout=1 s in step 3, and was stopped.*saved in"
    ):
        trainer.run()
    assert read_checkpoint(trainer.latest).step == 2
    trainer = Trainer(program, data, batch_size=4, run_directory=tmp_path, engine=engine, resume=True, progress=False)
    assert trainer.run().steps == 4


def test_evaluation_is_limited_too(program):
    session = Session(program, engine="onnxruntime")
    limit = stopping.TimeLimit(STEP_TIMEOUT)
    session.limit(limit)
    with pytest.raises(EngineError, match="The predict graph did not end within step_timeout=1 s after step 0"):
        session.predict(batch(ENDLESS))
    limit.close()


STOPPED = """
import sys, threading, time
from burnish import stopping

def stopped(seconds):
    thread, begun = threading.get_ident(), threading.Event()

    def press():
        begun.wait()
        time.sleep(seconds)
        run = stopping._under_way.get(thread)
        if run is not None:
            stopping._stop(thread, run)

    def run():
        begun.set()
        return sum(1 for _ in range(1_000_000))

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        return stopping.in_python("step", run)
    finally:
        pressing.join()

ends = set()
for round in range(40):
    try:
        ends.add(stopped(round * 0.002))
    except stopping.RunStopped as error:
        ends.add(error.graph)
stop = stopping.PythonStop()
try:  # at the last moment: the run has ended when Python would raise
    stopping.stoppable(stop, "late", type(stop).terminate.fset, stop, True)
except stopping.RunStopped as error:
    ends.add(error.graph)
assert ends == {"step", 1_000_000, "late"}, ends
assert not stopping._under_way and not stop.terminate
sys.settrace(lambda *event: None)
(lambda: None)()
sys.settrace(None)
print("traced")
"""


def test_a_stop_that_comes_late_leaves_nothing_behind():
    """What Python looks for and never finds would hold up a thread that a debugger traces, for ever."""
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "traced\n", ended.stderr


class _Slow:
    """Is let go for a while; Python drops the exceptions that are raised in there."""

    def __del__(self) -> None:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("goes_on", [0.0, 60.0])
def test_a_limit_of_time_holds_if_python_drops_the_exception(goes_on: float):
    def run() -> None:
        until = time.monotonic() + 0.2 + goes_on
        _Slow()
        while time.monotonic() < until:
            pass

    began = time.monotonic()
    with pytest.raises(stopping.TimePassed):
        stopping.within_time(0.05, run)
    assert time.monotonic() - began < 30


def test_ctrl_c_of_a_program_that_means_something_else_stops_nothing(program, monkeypatch):
    """A handler of the program's own hears of it when the run has ended."""
    heard = []
    earlier = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        os.kill(os.getpid(), signal.SIGINT)
        Session(program, engine="onnxruntime").step(batch())
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert heard == [signal.SIGINT]


@spread("seconds", [0, -1, float("nan"), float("inf"), "1", True], test=1)
def test_a_limit_is_a_number_above_0(program, tmp_path, seconds):
    with pytest.raises(ConfigurationError, match=r"step_timeout=.*: give a number of seconds above 0, or leave it out"):
        Trainer(program, batch(), run_directory=tmp_path, step_timeout=seconds)
