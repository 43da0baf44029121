"""What is written for other tools: TensorBoard's event files, runs in MLflow and in Weights & Biases."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import burnish
from burnish.errors import CallbackError, ConfigurationError
from burnish.installing import install_command
from burnish.models import residual_network
from burnish.training import Session, Trainer, run_folder
from burnish.training.callbacks import Callback, MLflow, TensorBoard, WeightsAndBiases, check_logger, logger
from burnish.training.callbacks.loggers import Gradients
from oracles.tiny_program import tiny_batch, tiny_program

pytestmark = pytest.mark.usefixtures("frequent_rows")

PROGRAM = tiny_program()


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """Drawing takes longer than all of these runs."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)


def trainer(folder: Path, *callbacks: Callback, **options) -> Trainer:
    settings = {"epochs": 2, "batch_size": 5, "progress": False, "eval_data": tiny_batch(11, 1), "overwrite": True} | options
    return Trainer(PROGRAM, tiny_batch(20), run_directory=folder / "run", callbacks=callbacks, **settings)


def events(folder: Path) -> dict[str, list[tuple[int, object]]]:
    """Read event files: by tag, steps and values. A record is length, checksum, content, checksum (TensorFlow, TFRecord)."""
    from tensorboardX.proto.event_pb2 import Event

    read = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            for value in event.summary.value:
                read[value.tag].append((event.step, value))
            content = content[16 + length :]
    return read


@pytest.mark.slow
def test_event_files_hold_the_figures_of_the_run(tmp_path):
    pytest.importorskip("tensorboardX")
    run = trainer(tmp_path, TensorBoard(tmp_path / "tb", every=2))
    run.run()
    read = events(tmp_path / "tb")
    assert [step for step, _ in read["train/loss"]] == [2, 4, 6, 8]
    assert "\n    epochs: 2\n" in read["configuration/text_summary"][0][1].tensor.string_val[0].decode()
    rows = {row["step"]: row for row in run.rows}
    for step, value in read["train/loss"]:
        assert value.simple_value == pytest.approx((rows[step]["loss"] + rows[step - 1]["loss"]) / 2, rel=1e-6)
    assert [(step, value.simple_value) for step, value in read["evaluation/accuracy"]] == [
        (step, pytest.approx(rows[step]["eval_accuracy"])) for step in (4, 8)
    ]
    assert all(value.simple_value == pytest.approx(0.1) for _, value in read["learning_rate"])
    assert all(value.simple_value > 0 for _, value in read["speed/samples_per_second"])
    assert read["memory/planned_step_bytes"][0][1].simple_value == PROGRAM.planned_peak(5).bytes
    if sys.platform == "linux":
        assert read["memory/resident_bytes"][0][1].simple_value > 1e6


@pytest.mark.slow
def test_histograms_are_those_of_weights_and_gradients(tmp_path):
    pytest.importorskip("tensorboardX")
    run = trainer(tmp_path, TensorBoard(tmp_path / "tb", histograms=2))
    run.run()
    read = events(tmp_path / "tb")
    state = run.session.state()
    for name in ("weight", "bias", "scale"):
        ((step, value),) = read[f"weights/{name}"]
        assert (step, value.histo.num) == (8, state[f"param/{name}"].size)
        assert value.histo.min == pytest.approx(state[f"param/{name}"].min())
    assert {tag for tag in read if tag.startswith("gradients/")} == {"gradients/weight", "gradients/bias"}
    ((_, gradient),) = read["gradients/weight"]
    # softmax's gradients of all classes cancel, whatever the batch
    assert gradient.histo.sum == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_gradients_of_a_batch_are_those_of_the_step(engine):
    session = Session(PROGRAM, engine)
    batch, before = tiny_batch(8, 5), session.state()
    gradients = Gradients(session)(batch, before)
    session.step(batch)
    after = session.state()
    for name in ("weight", "bias"):  # momentum begins at zero
        np.testing.assert_allclose(after[f"opt/momentum/{name}"], gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_pictures_of_the_worst_examples(tmp_path):
    pytest.importorskip("tensorboardX")
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd")
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(16, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, 16)}
    settings = {"batch_size": 8, "progress": False, "run_directory": tmp_path / "run"}
    Trainer(program, data, callbacks=[TensorBoard(tmp_path / "tb", histograms=0, examples=3)], **settings).run()
    read = events(tmp_path / "tb")
    for rank in range(3):
        ((step, value),) = read[f"worst/{rank}"]
        assert (step, value.image.height, value.image.width, value.image.colorspace) == (2, 8, 8, 1)
        assert value.image.encoded_image_string.startswith(b"\x89PNG")
        place = value.image.encoded_image_string.index(b"IDAT")
        assert len(zlib.decompress(value.image.encoded_image_string[place + 4 :])) == 8 * 9
    (text,) = [value for tag, values in read.items() if tag.startswith("worst examples") for _, value in values]
    assert text.tensor.string_val[0].decode().count("\n") == 4
    assert not [tag for tag in read if tag.startswith(("weights", "gradients"))]


def test_the_steps_that_are_left_at_the_end_are_written_too(tmp_path):
    pytest.importorskip("tensorboardX")
    run = trainer(tmp_path, TensorBoard(tmp_path / "tb", every=3, histograms=0, examples=0))
    run.run()
    read = events(tmp_path / "tb")
    assert [step for step, _ in read["train/loss"]] == [3, 6, 8]
    rows = {row["step"]: row for row in run.rows}
    assert read["train/loss"][-1][1].simple_value == pytest.approx((rows[7]["loss"] + rows[8]["loss"]) / 2)
    assert [step for step, _ in read["learning_rate"]] == [step for step, _ in read["train/loss"]]


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    for module, kind, remedy in (
        ("tensorboardX", lambda: TensorBoard(tmp_path), install_command("tensorboardX")),
        ("mlflow", MLflow, install_command("mlflow")),
        ("wandb", WeightsAndBiases, install_command("wandb")),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigurationError, match=re.escape(f"not installed: {remedy}")):
            kind()
    with pytest.raises(ConfigurationError, match="every=0: give a whole number of 1 or more"):
        TensorBoard(tmp_path, every=0)


def test_a_logger_is_asked_for_by_text(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    board = logger("tensorboard:every=3,histograms=0", tmp_path, "average")
    assert (board.folder, board.every, board.histograms, board.parameters) == (tmp_path / "events", 3, 0, "average")
    assert logger("tensorboard:folder=elsewhere", tmp_path).folder == Path("elsewhere")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    tracker = logger("wandb:project=digits,mode=offline", tmp_path)
    assert (tracker.project, tracker.name, tracker.mode) == ("digits", str(tmp_path), "offline")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for text, message in (
        (
            "tensorbord",
            r"logger 'tensorbord': there is no such logger \(did you mean 'tensorboard'\?\); give tensorboard, mlflow",
        ),
        ("wandb:projekt=digits", r"logger 'wandb' has no option 'projekt' \(did you mean 'project'\?\)"),
        ("mlflow", re.escape(f"MLflow is not installed: {install_command('mlflow')}")),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_logger(text)


class Fails(Callback):
    """Stops a run by an error."""

    def on_epoch_end(self, run, report):
        raise ValueError("boom")


def test_mlflow_has_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not among the packages of the tests")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    tracker = MLflow("digits", "first", tracking_uri=uri, every=2)
    run = trainer(tmp_path, tracker)
    run.run()
    client = mlflow.MlflowClient(uri)
    kept = client.get_run(tracker.run_id)
    assert (kept.info.status, kept.info.run_name) == ("FINISHED", "first")
    assert kept.data.params["batch_size"] == "5"
    assert kept.data.params["loss"] == "cross_entropy"
    assert kept.data.metrics["evaluation/accuracy"] == pytest.approx(run.rows[-1]["eval_accuracy"])
    assert [metric.step for metric in client.get_metric_history(tracker.run_id, "train/loss")] == [2, 4, 6, 8]
    assert [artifact.path for artifact in client.list_artifacts(tracker.run_id)] == ["metrics.csv"]
    failing = MLflow("digits", tracking_uri=uri)
    with pytest.raises(CallbackError):
        trainer(tmp_path, failing, Fails()).run()
    assert client.get_run(failing.run_id).info.status == "FAILED"


def test_weights_and_biases_has_the_run(tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not among the packages of the tests")
    run = trainer(tmp_path, WeightsAndBiases("digits", "first", mode="offline", every=2))
    run.run()
    wandb.teardown()  # its process writes the rest
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (written,) = folder.glob("*.wandb")
    content = written.read_bytes()
    assert b"evaluation/accuracy" in content
    assert b"batch_size" in content
