"""Callbacks: their order, what they are told, stopping and resuming, and errors that name them."""

from __future__ import annotations

import pytest

from burnish.errors import CallbackError, ConfigurationError
from burnish.training import Trainer, read_checkpoint, run_folder
from burnish.training.callbacks import Callback, EarlyStopping
from oracles.same_state import assert_same_state
from oracles.tiny_program import tiny_batch, tiny_program

SAMPLES, BATCH = 20, 5
PROGRAM = tiny_program()


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than all of these runs."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)


def trainer(folder, *callbacks: Callback, **options) -> Trainer:
    settings = {"epochs": 2, "batch_size": BATCH, "seed": 4, "progress": False, "eval_data": tiny_batch(11, 1)} | options
    return Trainer(PROGRAM, tiny_batch(SAMPLES), run_directory=folder, callbacks=callbacks, **settings)


class Recorder(Callback):
    """Writes down what it is told."""

    def __init__(self, log: list, name: str = "a"):
        self.log, self.name = log, name

    def on_run_begin(self, run):
        self.log.append((self.name, "run begin"))

    def on_run_end(self, run, error):
        self.log.append((self.name, "run end", None if error is None else type(error).__name__))

    def on_epoch_begin(self, run, epoch):
        self.log.append((self.name, "epoch begin", epoch))

    def on_epoch_end(self, run, report):
        self.log.append((self.name, "epoch end", report.epoch, report.is_best))
        assert report.evaluation == {name: run.rows[-1][f"eval_{name}"] for name in ("loss", "accuracy")}
        assert report.training["loss"] > 0

    def on_step_end(self, run, report):
        self.log.append((self.name, "step end", report.step))
        assert report.samples == BATCH * report.step
        assert len(report.batch["labels"]) == BATCH
        assert report.rate == pytest.approx(0.1)
        assert set(report.figures) == {"loss", "accuracy"}

    def on_evaluate(self, run, figures):
        self.log.append((self.name, "evaluate"))

    def on_checkpoint(self, run, path):
        assert path.exists()
        self.log.append((self.name, "checkpoint", path.stem))


class StopAt(Callback):
    """Stops a run after a number of steps."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, run, report):
        if report.step == self.step:
            run.stop("enough")


class FailsIn(Callback):
    """Raises an exception at an event."""

    def __init__(self, event: str):
        setattr(type(self), event, self._fail)

    @staticmethod
    def _fail(*told):
        raise ValueError("boom")


def test_order_of_events(tmp_path):
    log: list = []
    result = trainer(tmp_path, Recorder(log, "a"), Recorder(log, "b"), epochs=1, checkpoint_every=2).run()
    assert result.stopped is None
    assert log[0::2] == [("a", *entry[1:]) for entry in log[1::2]]
    assert [entry[1:] for entry in log[0::2]] == [
        ("run begin",),
        ("epoch begin", 1),
        ("step end", 1),
        ("step end", 2),
        ("checkpoint", "latest"),
        ("step end", 3),
        ("step end", 4),
        ("evaluate",),
        ("epoch end", 1, True),
        ("checkpoint", "best"),
        ("checkpoint", "latest"),
        ("run end", None),
    ]


@pytest.mark.slow
def test_callbacks_change_nothing_that_is_computed(tmp_path):
    plain, watched = trainer(tmp_path / "plain"), trainer(tmp_path / "watched", Recorder([]))
    assert plain.run().metrics == watched.run().metrics
    assert_same_state(plain.session.state(), watched.session.state())


@pytest.mark.slow
def test_a_callback_stops_a_run_which_goes_on_bit_for_bit(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.run()
    result = trainer(tmp_path / "run", StopAt(3)).run()
    assert (result.stopped, result.steps) == ("enough", 3)
    assert set(result.metrics) == {"loss", "accuracy"}
    again = trainer(tmp_path / "run", resume=True)
    assert again.run().stopped is None
    assert_same_state(whole.session.state(), again.session.state())


@pytest.mark.parametrize(
    "event", ["on_run_begin", "on_step_end", "on_evaluate", "on_epoch_end", "on_checkpoint", "on_run_end", "state"]
)
def test_an_error_names_the_callback_and_the_event(event, tmp_path):
    kind = type("Broken", (FailsIn,), {})
    log: list = []
    with pytest.raises(
        CallbackError, match=rf"The callback Broken failed in {event}: ValueError: boom\. Mend it or leave it out"
    ):
        trainer(tmp_path, kind(event), Recorder(log)).run()
    assert log[-1][:2] == ("a", "run end")
    if event == "on_step_end":
        assert read_checkpoint(tmp_path / "checkpoints" / "latest.safetensors").extra["position"]["step"] == 1


def test_an_error_is_not_hidden_by_one_at_the_end(tmp_path, capsys):
    ending, stepping = type("Ending", (FailsIn,), {})("on_run_end"), type("Stepping", (FailsIn,), {})("on_step_end")
    with pytest.raises(CallbackError, match="Stepping failed in on_step_end"):
        trainer(tmp_path, ending, stepping, progress=True).run()
    assert "The callback Ending failed in on_run_end: ValueError: boom" in capsys.readouterr().out


def test_a_state_that_no_checkpoint_holds_is_refused(tmp_path):
    class Keeps(Callback):
        def state(self):
            return {"set": {1}}

    with pytest.raises(CallbackError, match="callback Keeps returned a state that no checkpoint can hold"):
        trainer(tmp_path, Keeps()).run()


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"is no burnish\.training\.callbacks\.Callback"):
        trainer(tmp_path, EarlyStopping)


class Figures(Callback):
    """Replaces the figures of an evaluation, before others read them."""

    def __init__(self, losses: list[float]):
        self.losses = losses

    def on_evaluate(self, run, figures):
        figures["loss"] = self.losses[int(run.session.step_count / (SAMPLES / BATCH)) - 1]


LOSSES = [3.0, 2.0, 2.5, 1.95, 2.2, 1.0, 1.0]


@pytest.mark.slow
def test_early_stopping(tmp_path):
    stopping = EarlyStopping(patience=2, min_delta=0.1)
    result = trainer(tmp_path, Figures(LOSSES), stopping, epochs=7).run()
    assert result.steps == 4 * SAMPLES / BATCH
    assert result.stopped == "loss was best at 2.0000, and has not become better for 2 epochs"


@pytest.mark.slow
def test_early_stopping_goes_on_counting_where_a_run_is_resumed(tmp_path):
    trainer(tmp_path, Figures(LOSSES), EarlyStopping(2, min_delta=0.1), epochs=3).run()
    result = trainer(tmp_path, Figures(LOSSES), EarlyStopping(2, min_delta=0.1), epochs=7, resume=True).run()
    assert result.steps == 4 * SAMPLES / BATCH
    again = trainer(tmp_path, Figures(LOSSES), EarlyStopping(2, min_delta=0.1), epochs=7, resume=True).run()
    assert (again.steps, again.stopped) == (result.steps, result.stopped)


def test_early_stopping_watches_what_there_is(tmp_path):
    with pytest.raises(CallbackError, match="metric='f1': the run reports 'loss', 'accuracy'"):
        trainer(tmp_path, EarlyStopping(metric="f1")).run()
    for options, message in (({"patience": 0}, "patience=0: give a whole number"), ({"min_delta": -1.0}, "min_delta=-1.0")):
        with pytest.raises(ConfigurationError, match=message):
            EarlyStopping(**options)
