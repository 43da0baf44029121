"""The session: steps, evaluation, state, export."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import CheckpointError, ConfigurationError, EngineError, InputError, NonFiniteLossError
from burnish.training import Session
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program

ENGINES = ["onnxruntime", "reference"]


@pytest.fixture(scope="module")
def program():
    return tiny_program()


def assert_same_state(actual, expected):
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_returns_loss_and_metrics_as_floats(program, engine):
    session = Session(program, engine, threads=1)
    state = program.initial_state(0)
    for number in range(3):
        batch = tiny_batch(seed=number)
        result = session.step(batch)
        loss, state = numpy_step(state, batch)
        assert list(result) == ["loss", "accuracy"]
        assert all(type(value) is float for value in result.values())
        assert result["loss"] == pytest.approx(loss, rel=1e-5)
        assert session.step_count == number + 1
    np.testing.assert_allclose(session.state()["param/weight"], state["param/weight"], rtol=1e-5)


def test_a_hyperparameter_is_for_one_step(program):
    session = Session(program, threads=1)
    batch = tiny_batch()
    session.step(batch, lr=0.0)
    np.testing.assert_array_equal(session.state()["param/weight"], program.weights["param/weight"])
    session.load_state(program.initial_state(0))
    session.step(batch, lr=0.01)
    session.step(batch)
    _, state = numpy_step(program.initial_state(0), batch, lr=0.01)
    _, state = numpy_step(state, batch, lr=LR)
    np.testing.assert_allclose(session.state()["param/weight"], state["param/weight"], rtol=1e-5)
    with pytest.raises(ConfigurationError, match=r"no hyperparameter 'learning_rate'; a step of this program takes lr"):
        session.step(batch, learning_rate=0.1)
    with pytest.raises(ConfigurationError, match=r"The hyperparameter 'lr' is None: give one finite number"):
        session.step(batch, lr=None)


def test_training_lowers_the_loss(program):
    session = Session(program, threads=1)
    data = [tiny_batch(32, seed=number) for number in range(4)]
    before = session.evaluate_data(data)
    for _ in range(20):
        for batch in data:
            session.step(batch)
    after = session.evaluate_data(data)
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]


def test_the_seed_and_a_given_state_decide_the_start(program):
    np.testing.assert_array_equal(Session(program, seed=5).state()["rng/key"], [5, 0])
    state = program.initial_state(1)
    state["param/bias"] += 1
    assert_same_state(Session(program, state=state).state(), state)


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_over_batches_of_different_sizes_is_exact(program, engine):
    session = Session(program, engine, threads=1)
    sizes = (7, 1, 12)
    batches = [tiny_batch(size, seed=number) for number, size in enumerate(sizes)]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in ("x", "labels")}
    done = []
    over_batches = session.evaluate_data(iter(batches), progress=done.append)
    at_once = session.evaluate(whole)
    assert done == [1, 2, 3]
    assert over_batches["loss"] == pytest.approx(at_once["loss"], rel=1e-6)
    totals = session.evaluate_totals(whole)
    assert set(totals) == {"sum:loss", "count:loss", "sum:accuracy", "count:accuracy"}
    assert over_batches["accuracy"] == totals["sum:accuracy"] / 20
    assert set(at_once) == {"loss", "accuracy"}


def test_nothing_to_evaluate_is_named(program):
    with pytest.raises(InputError, match=r"There is no batch to evaluate: the data set is empty"):
        Session(program).evaluate_data([])
    with pytest.raises(InputError, match=r"The data to evaluate is None: give a list or another iterable of batches"):
        Session(program).evaluate_data(None)


@pytest.mark.parametrize("method", ["export", "save_checkpoint", "restore"])
def test_what_is_no_name_of_a_file_is_refused(program, method, tmp_path):
    session = Session(program)
    with pytest.raises(CheckpointError, match=r"None is not a path: give the name of a file, such as"):
        getattr(session, method)(None)
    with pytest.raises(CheckpointError, match=r"'.*' is a folder: give the name of a file, such as"):
        getattr(session, method)(tmp_path)


def test_prediction_needs_no_labels_and_takes_a_whole_batch(program):
    session = Session(program, threads=1)
    batch = tiny_batch(5)
    without = session.predict({"x": batch["x"]})["logits"]
    assert without.shape == (5, 3)
    np.testing.assert_array_equal(session.predict(batch)["logits"], without)
    with pytest.raises(InputError, match=r"unexpected input 'targets'"):
        session.predict({"x": batch["x"], "targets": batch["labels"]})


def test_a_bad_batch_runs_nothing(program):
    session = Session(program, threads=1)
    session.step(tiny_batch())
    before = session.state()
    batch = tiny_batch()
    batch["labels"][3] = 3
    with pytest.raises(InputError, match=r"'labels' holds 3 at \[3\], out of range: valid are 0\.\.2"):
        session.step(batch)
    for call in (session.evaluate, session.predict):
        with pytest.raises(InputError, match=r"lacks the input 'x'"):
            call({"labels": batch["labels"]})
    assert_same_state(session.state(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_non_finite_loss_loses_nothing(program, engine):
    session = Session(program, engine, threads=1)
    session.step(tiny_batch())
    before = session.state()
    broken = tiny_batch(seed=1)
    broken["x"][0, 0] = np.inf
    with pytest.raises(NonFiniteLossError, match=r"The loss at step 1 is nan\. The state is kept"):
        session.step(broken)
    assert_same_state(session.state(), before)
    assert session.step_count == 1
    session.step(tiny_batch(seed=2))


def test_state_and_load_state_are_bitwise_and_copies(program):
    first, second = Session(program, threads=1), Session(program, threads=1)
    for number in range(3):
        first.step(tiny_batch(seed=number))
    state = first.state()
    second.load_state(state)
    state["param/weight"][:] = 0
    for number in range(3, 6):
        assert first.step(tiny_batch(seed=number)) == second.step(tiny_batch(seed=number))
    assert_same_state(second.state(), first.state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("param/bias"), r"The state does not fit the program: missing 'param/bias'\. Give what session.state"),
        (lambda s: s.update(extra=np.zeros(2)), r"unknown 'extra'"),
        (lambda s: s.update({"stat/mean": np.zeros(5, np.float32)}), r"'stat/mean' has shape \[5\], expected \[4\]"),
        (lambda s: s.update({"stat/mean": np.zeros(4)}), r"'stat/mean' has dtype float64, expected float32"),
        (lambda s: s.update(step=3), r"'step' is a int, not an array"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(program, change, message):
    session = Session(program, threads=1)
    session.step(tiny_batch())
    before = session.state()
    state = session.state()
    change(state)
    with pytest.raises(ConfigurationError, match=message):
        session.load_state(state)
    assert_same_state(session.state(), before)
    with pytest.raises(ConfigurationError, match=message):
        Session(program, state=state)


def test_every_difference_of_a_state_is_named_but_not_a_thousand(program):
    state = {f"param/{number}": np.zeros(1) for number in range(20)}
    with pytest.raises(ConfigurationError, match=r"missing .* and 3 more; unknown 'param/0', .*'param/4' and 15 more\."):
        Session(program, state=state)


def test_the_second_step_compiles_nothing(program, monkeypatch):
    made = []
    load = OnnxRuntimeEngine.inference_session

    def counted(self, model, graph, threads):
        made.append(graph)
        return load(self, model, graph, threads)

    monkeypatch.setattr(OnnxRuntimeEngine, "inference_session", counted)
    session = Session(program, threads=1)
    for size in (4, 4, 9):
        session.step(tiny_batch(size))
        session.evaluate(tiny_batch(size))
    session.load_state(session.state())
    session.step(tiny_batch())
    assert made == ["step", "evaluate"]


@pytest.mark.parametrize("engine", [*ENGINES, "torch"])
def test_threads_that_share_a_session_wait_for_each_other(program, engine):
    """The same batch in every step: the order does not matter, and the state is that of as many steps one after the other."""
    alone, shared = Session(program, engine=engine, threads=1), Session(program, engine=engine, threads=1)
    for _ in range(4 * 25):
        alone.step(tiny_batch())

    def use(position: int) -> None:
        for _ in range(25):
            shared.step(tiny_batch())
            shared.evaluate(tiny_batch(2 + position))
            shared.state()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert shared.step_count == 100
    assert_same_state(shared.state(), alone.state())


def test_a_closed_session_keeps_its_state(program, tmp_path):
    with Session(program, threads=1) as session:
        session.step(tiny_batch())
        state = session.state()
    session.close()
    assert_same_state(session.state(), state)
    assert session.step_count == 1
    session.save_checkpoint(tmp_path / "closed.safetensors")
    session.export(tmp_path / "closed.onnx")
    with pytest.raises(EngineError, match=r"The session is closed: open another with Session\(program, state=session.state"):
        session.step(tiny_batch())
    assert_same_state(Session(program, state=session.state()).state(), state)


def test_an_export_runs_on_a_bare_runtime(program, tmp_path):
    session = Session(program, threads=1)
    for number in range(5):
        session.step(tiny_batch(seed=number))
    path = session.export(tmp_path / "tuned.onnx")
    bare = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = tiny_batch(6, seed=9)["x"]
    assert [value.name for value in bare.get_inputs()] == ["x"]
    np.testing.assert_allclose(bare.run(["logits"], {"x": x})[0], session.predict({"x": x})["logits"], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "a"}, r"seed must be an integer from .*, not 'a'"),
        ({"seed": 1.5}, r"seed must be an integer from .*, not 1\.5"),
        ({"state": 3}, r"The state is of type int, not a dict of arrays by state name\. Give what session\.state\(\)"),
    ],
)
def test_arguments_of_another_kind_are_named(program, options, message):
    with pytest.raises(ConfigurationError, match=message):
        Session(program, **options)


def test_what_is_no_program_is_refused():
    with pytest.raises(ConfigurationError, match=r"A session opens a program, not a str: give what burnish\.compile"):
        Session("program")


def test_engine_options_that_do_not_fit_are_named(program):
    with pytest.raises(EngineError, match=r"no engine 'tpu'"):
        Session(program, engine="tpu")
    with pytest.raises(EngineError, match=r"device 'cpu' only, not on 'cuda'"):
        Session(program, device="cuda")
    for threads in (0, "2", True, 1025):
        with pytest.raises(EngineError, match=rf"threads={threads!r}: give a whole number from 1 to 1024, or leave it out"):
            Session(program, threads=threads)
