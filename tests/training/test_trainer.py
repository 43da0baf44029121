"""The trainer: what it computes, what it writes, and that a run goes on bit for bit wherever it stopped."""

from __future__ import annotations

import csv
import math
import re
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from burnish.data import ArrayDataset, Loader
from burnish.errors import CheckpointError, ConfigurationError, DataError, InputError, NonFiniteLossError
from burnish.installing import install_command
from burnish.training import Session, Trainer, TrainingInterrupted, read_checkpoint, run_folder
from burnish.training.run_position import is_better
from burnish.training.run_results import draw_curves
from burnish.training.trainer import STEPS_PER_ROW
from oracles.combinations import spread
from oracles.same_state import assert_same_state
from oracles.tiny_program import CLASSES, FEATURES, tiny_batch, tiny_program

pytestmark = pytest.mark.usefixtures("frequent_rows")

SAMPLES, BATCH = 23, 5
PROGRAM = tiny_program()


def samples(count: int = SAMPLES, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    centers = generator.normal(size=(CLASSES, FEATURES))
    return (centers[labels] + 0.3 * generator.normal(size=(count, FEATURES))).astype(np.float32), labels


def trainer(folder: Path, **options) -> Trainer:
    settings = {"epochs": 3, "batch_size": BATCH, "seed": 4, "progress": False, "eval_data": samples(11, 1)} | options
    return Trainer(PROGRAM, settings.pop("train_data", samples()), run_directory=folder, **settings)


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than all of these runs; the tests of the curves bring it back."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


class StopAfter:
    """A progress that sends Ctrl-C after a number of steps."""

    def __init__(self, steps: int, signals: int = 1):
        self.left, self.signals = steps, signals
        self.notes: list[str] = []

    def start(self, step, steps):
        pass

    def step(self, reached):
        self.left -= 1
        if self.left == 0:
            for _ in range(self.signals):
                signal.raise_signal(signal.SIGINT)

    def epoch(self, reached, evaluation):
        pass

    def note(self, text):
        self.notes.append(text)

    def close(self):
        pass


def test_a_run_is_the_steps_of_a_session_in_the_loaders_order(tmp_path):
    run = trainer(tmp_path)
    result = run.run()
    features, labels = samples()
    session = Session(PROGRAM, seed=4)
    loader = Loader(ArrayDataset({"x": features, "labels": labels}), BATCH, seed=4)
    rows = []
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            rows.append(session.step(batch))
    assert_same_state(run.session.state(), session.state())
    assert result.steps == 15
    x, y = samples(11, 1)
    assert result.metrics == session.evaluate_data(Loader(ArrayDataset({"x": x, "labels": y}), BATCH, shuffle=False).epoch(0))
    written = table(tmp_path)
    assert [float(row["loss"]) for row in written] == [row["loss"] for row in rows]
    assert [row["step"] for row in written] == [str(step) for step in range(1, 16)]
    assert [row["eval_loss"] != "" for row in written] == ([False] * 4 + [True]) * 3
    assert float(written[-1]["eval_accuracy"]) == result.metrics["accuracy"]
    assert {row["lr"] for row in written} == {"0.1"}
    assert int(written[-1]["samples"]) == 3 * SAMPLES


@pytest.mark.parametrize(("count", "steps"), [(40, [20]), (42, [20, 21]), (600, [*range(30, 301, 30)])])
def test_a_short_epoch_has_one_row_and_a_long_one_ten(tmp_path, monkeypatch, count: int, steps: list[int]):
    monkeypatch.setattr("burnish.training.trainer.STEPS_PER_ROW", STEPS_PER_ROW)
    result = trainer(tmp_path, train_data=samples(count), epochs=1, eval_data=None, batch_size=2).run()
    assert [row["step"] for row in result.history] == steps


def test_rows_average_over_samples_not_batches(tmp_path):
    features, labels = samples(103)
    result = trainer(tmp_path, train_data=(features, labels), epochs=1, eval_data=None, batch_size=2).run()
    steps = [row["step"] for row in result.history]
    assert steps == [6, 12, 18, 24, 30, 36, 42, 48, 52]
    session = Session(PROGRAM, seed=4)
    losses = [
        (session.step(batch)["loss"], len(batch["labels"]))
        for batch in Loader(ArrayDataset({"x": features, "labels": labels}), 2, seed=4).epoch(0)
    ]
    last = losses[48:]
    assert sum(count for _, count in last) == 7
    assert result.history[-1]["loss"] == pytest.approx(sum(loss * count for loss, count in last) / 7, rel=1e-12)
    assert result.metrics["loss"] == pytest.approx(sum(loss * count for loss, count in losses) / 103, rel=1e-12)
    assert result.best["metric"] == "accuracy"


def test_data_for_evaluation_that_do_not_fit_are_refused_before_training(tmp_path):
    features, labels = samples(3)
    with pytest.raises(InputError, match=r"eval_data: The batch lacks the input 'labels' \(int64"):
        trainer(tmp_path / "run", eval_data={"x": features})
    with pytest.raises(InputError, match=r"eval_data: The input 'labels' holds 99 at \[0\], out of range"):
        trainer(tmp_path / "run", eval_data={"x": features, "labels": labels * 0 + 99})
    assert not (tmp_path / "run").exists()


@spread("steps", [1, 4, 5, 7, 14], test=2)
def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(tmp_path, steps):
    whole = trainer(tmp_path / "whole")
    expected = whole.run()
    with pytest.raises(
        TrainingInterrupted, match=r"Stopped in epoch \d after \d of its batches\. Everything is saved in"
    ) as stop:
        trainer(tmp_path / "parts", progress=StopAfter(steps)).run()
    assert stop.value.checkpoint == tmp_path / "parts" / "checkpoints" / "latest.safetensors"
    assert read_checkpoint(stop.value.checkpoint).step == steps
    resumed = trainer(tmp_path / "parts", resume=True)
    result = resumed.run()
    assert_same_state(resumed.session.state(), whole.session.state())
    assert table(tmp_path / "parts") == table(tmp_path / "whole")
    assert (result.metrics, result.best, result.steps) == (expected.metrics, expected.best, expected.steps)
    best = [read_checkpoint(tmp_path / run / "checkpoints" / "best.safetensors") for run in ("whole", "parts")]
    assert_same_state(best[0].state, best[1].state)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as stop:
        trainer(tmp_path, progress=StopAfter(2, signals=2)).run()
    assert not isinstance(stop.value, TrainingInterrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rows_behind_the_checkpoint_are_written_once(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.run()
    run = trainer(tmp_path / "killed", checkpoint_every=3)
    step = run.session.step
    calls = []

    def killed(batch, **hyperparameters):
        calls.append(1)
        if len(calls) == 9:
            raise SystemExit("killed")
        return step(batch, **hyperparameters)

    run.session.step = killed
    with pytest.raises(SystemExit):
        run.run()
    assert len(table(tmp_path / "killed")) == 8
    assert read_checkpoint(run.latest).step == 6
    with (tmp_path / "killed" / "metrics.csv").open("a") as file:
        file.write("9,2,4")
    resumed = trainer(tmp_path / "killed", checkpoint_every=3, resume=True)
    assert len(table(tmp_path / "killed")) == 6
    resumed.run()
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    assert_same_state(resumed.session.state(), whole.session.state())


def test_more_epochs_go_on_behind_the_last(tmp_path):
    whole = trainer(tmp_path / "whole", epochs=4)
    whole.run()
    trainer(tmp_path / "parts", epochs=2).run()
    assert trainer(tmp_path / "parts", epochs=2, resume=True).run().steps == 10
    more = trainer(tmp_path / "parts", epochs=4, resume=True)
    more.run()
    assert_same_state(more.session.state(), whole.session.state())
    assert table(tmp_path / "parts") == table(tmp_path / "whole")


def test_the_schedule_and_augmentation_resume_too(tmp_path):
    def noisy(batch, generator):
        return {**batch, "x": batch["x"] + generator.normal(size=batch["x"].shape).astype(np.float32)}

    options = {"schedule": "cosine", "lr": 0.5, "augment": noisy}
    whole = trainer(tmp_path / "whole", **options)
    whole.run()
    with pytest.raises(TrainingInterrupted):
        trainer(tmp_path / "parts", progress=StopAfter(7), **options).run()
    resumed = trainer(tmp_path / "parts", resume=True, **options)
    resumed.run()
    assert_same_state(resumed.session.state(), whole.session.state())
    rates = [float(row["lr"]) for row in table(tmp_path / "parts")]
    assert rates == pytest.approx([0.25 * (1 + np.cos(np.pi * step / 15)) for step in range(15)])


def test_a_loss_that_is_not_finite_keeps_the_state_and_says_what_to_try(tmp_path):
    features, labels = samples()
    features[3] = np.inf
    dataset = ArrayDataset({"x": features, "labels": labels})
    run = trainer(tmp_path, train_data=dataset)
    order = Loader(dataset, BATCH, seed=4).order(0).tolist()
    batch = order.index(3) // BATCH
    with pytest.raises(NonFiniteLossError) as error:
        run.run()
    message = str(error.value)
    assert f"Training stopped in epoch 1, batch {batch + 1}" in message
    assert "latest.safetensors'" in message
    assert message.endswith("Try a learning rate below 0.1, such as 0.01, from the start")
    checkpoint = read_checkpoint(run.latest)
    assert checkpoint.step == batch
    assert all(np.isfinite(array).all() for array in checkpoint.state.values())
    features[3] = 0
    repaired = trainer(tmp_path, train_data=ArrayDataset({"x": features, "labels": labels}), resume=True)
    assert repaired.run().steps == 15


def test_a_state_that_overflowed_is_not_saved(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"Training stopped in epoch 1, batch \d+\. Try a learning rate .* from the start$"
    ):
        trainer(tmp_path, train_data=(samples()[0] * 1e18, samples()[1]), lr=1e30).run()
    assert not (tmp_path / "checkpoints").exists()
    trainer(tmp_path, train_data=(samples()[0] * 1e18, samples()[1]), epochs=1, lr=1e-30).run()
    before = (tmp_path / "checkpoints" / "latest.safetensors").read_bytes()
    with pytest.raises(NonFiniteLossError, match=r"latest\.safetensors' holds the last state that was whole\. Try .*\(resume\)$"):
        trainer(tmp_path, train_data=(samples()[0] * 1e18, samples()[1]), lr=1e30, resume=True).run()
    assert (tmp_path / "checkpoints" / "latest.safetensors").read_bytes() == before


def test_a_batch_that_cannot_be_read_loses_nothing(tmp_path):
    class Damaged(ArrayDataset):
        def batch(self, indices):
            if 3 in indices:
                raise DataError("image-3.png: damaged, or no image; repair or remove it")
            return super().batch(indices)

    features, labels = samples()
    run = trainer(tmp_path, train_data=Damaged({"x": features, "labels": labels}))
    with pytest.raises(DataError, match=r"image-3\.png: damaged.* Training stopped in epoch 1, batch \d; the state before it is"):
        run.run()
    whole = trainer(tmp_path / "whole")
    whole.run()
    resumed = trainer(tmp_path, resume=True)
    resumed.run()
    assert_same_state(resumed.session.state(), whole.session.state())


def test_a_label_out_of_range_in_a_data_set_of_ones_own(tmp_path):
    features, labels = samples()
    labels[0] = CLASSES
    with pytest.raises(InputError, match=r"labels.*Training stopped in epoch 1, batch"):
        trainer(tmp_path, train_data={"x": features, "labels": labels}).run()


def test_the_best_epoch_is_kept(tmp_path):
    result = trainer(tmp_path, epochs=6, lr=3.0).run()
    values = [row["eval_accuracy"] for row in result.history if row["eval_accuracy"] is not None]
    best = int(np.argmax(values))
    assert result.best == {"epoch": best + 1, "metric": "accuracy", "value": max(values)}
    session = Session(PROGRAM)
    session.restore(tmp_path / "checkpoints" / "best.safetensors")
    x, y = samples(11, 1)
    assert session.evaluate({"x": x, "labels": y})["accuracy"] == pytest.approx(max(values))
    assert session.step_count == 5 * (best + 1)


def test_curves_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "draw_curves", draw_curves)
    trainer(tmp_path).run()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_note_takes_the_place_of_the_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "draw_curves", draw_curves)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    progress = StopAfter(0)
    trainer(tmp_path, progress=progress).run()
    assert not (tmp_path / "curves.png").exists()
    assert progress.notes == [
        f"'curves.png' was not drawn, as matplotlib is not installed ({install_command('matplotlib')}); "
        "metrics.csv holds the same figures"
    ]


def test_a_picture_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "draw_curves", draw_curves)
    (tmp_path / "curves.png").mkdir()
    progress = StopAfter(0)
    assert trainer(tmp_path, progress=progress).run().steps == 15
    assert "curves.png' is a folder: give the name of a file" in progress.notes[0]


def test_a_finished_run_says_so(tmp_path):
    trainer(tmp_path).run()
    progress = StopAfter(0)
    again = trainer(tmp_path, resume=True, progress=progress)
    assert again.finished
    assert again.run().steps == 15
    assert re.search(r"already finished after 15 steps; nothing to train: raise epochs \(--epochs\) above 3$", progress.notes[0])


def test_a_note_on_the_data_is_passed_on(tmp_path):
    batch = tiny_batch(8)
    lines = [",".join("abcdz"), *(",".join(map(str, [*row, label])) for row, label in zip(*batch.values(), strict=True))]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    progress = StopAfter(0)
    Trainer(tiny_program(), tmp_path / "data.csv", run_directory=tmp_path / "run", progress=progress).run()
    assert re.search(r"no column is called label, y or target; 'z', the last, is taken", progress.notes[0])


@pytest.mark.parametrize(
    ("metric", "value", "than", "better"),
    [
        ("accuracy", 0.6, 0.5, True),
        ("top_5", 0.5, 0.5, False),
        ("loss", 0.4, 0.5, True),
        ("mean_absolute_error", 0.6, 0.5, False),
        ("loss", 0.4, float("nan"), True),
        ("loss", float("nan"), 0.4, False),
    ],
)
def test_which_figure_is_better(metric, value, than, better):
    assert is_better(metric, value, than) is better


def test_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("burnish.training.progress.LINE_EVERY_SECONDS", math.inf)
    trainer(tmp_path, progress=True).run()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/3  train loss ")
    assert "  evaluation loss " in lines[0]
    assert "samples/s" in lines[2]
    assert lines[2].endswith(" 0 s left")


def test_a_run_in_another_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer(tmp_path).run()))
    thread.start()
    thread.join()
    assert results[0].steps == 15


def test_a_folder_with_a_run_is_not_overwritten_unasked(tmp_path):
    trainer(tmp_path).run()
    before = (tmp_path / "metrics.csv").read_text()
    with pytest.raises(ConfigurationError, match=r"holds a run already: .*\(resume=True\), .* \(overwrite=True\)"):
        trainer(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == before
    trainer(tmp_path, overwrite=True, epochs=1).run()
    assert len(table(tmp_path)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6}, "was started with batch_size=5, and is now to go on with batch_size=6"),
        ({"seed": 5}, "was started with seed=4, and is now to go on with seed=5"),
        ({"train_data": samples(9)}, "was started with samples=23, and is now to go on with samples=9"),
    ],
)
def test_a_run_goes_on_only_as_it_was_started(tmp_path, options, message):
    trainer(tmp_path, epochs=1).run()
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path, resume=True, **options)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is nothing to resume in .*: start the run without resume"):
        trainer(tmp_path, resume=True)


def test_a_checkpoint_of_a_session_has_no_position(tmp_path):
    Session(PROGRAM).save_checkpoint(tmp_path / "checkpoints" / "latest.safetensors")
    with pytest.raises(CheckpointError, match="was not written by a Trainer"):
        trainer(tmp_path, resume=True)


def test_a_table_of_something_else_is_not_overwritten_by_resuming(tmp_path):
    trainer(tmp_path, epochs=1).run()
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CheckpointError, match="is not the table of this run"):
        trainer(tmp_path, resume=True)
    assert (tmp_path / "metrics.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ConfigurationError, "epochs=0: give a whole number of 1 or more"),
        ({"epochs": "3"}, ConfigurationError, "epochs='3': give a whole number of 1 or more"),
        ({"batch_size": "a"}, ConfigurationError, "batch_size='a': give a whole number"),
        ({"seed": "a"}, ConfigurationError, "seed must be an integer .*, not 'a'"),
        ({"lr": -1.0}, ConfigurationError, "'lr' is -1.0: give one finite number that is not negative"),
        ({"checkpoint_every": 0}, ConfigurationError, "checkpoint_every=0: give a whole number of 1 or more"),
        ({"batch_size": 0}, ConfigurationError, "batch_size=0"),
        ({"schedule": "linear"}, ConfigurationError, "no learning-rate schedule 'linear'; choose among constant, cosine"),
        ({"train_data": 3}, DataError, "no data set is made of a value of type int: give"),
        ({"train_data": (np.zeros((4, 7)), np.zeros(4))}, DataError, r"data: 'x' wants samples of shape \[4\]"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        trainer(tmp_path, **options)


def test_float64(tmp_path):
    program = tiny_program(ir.DataType.DOUBLE)
    result = Trainer(program, samples(), epochs=1, run_directory=tmp_path, progress=False).run()
    assert np.isfinite(result.metrics["loss"])
