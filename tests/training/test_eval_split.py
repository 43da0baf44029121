"""A part held out by the trainer and by fine-tuning: the same each time, kept in the folder, refused beside other data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import burnish
from burnish.data import Batches
from burnish.errors import BurnishError, CheckpointError, ConfigurationError, DataError
from burnish.models import create
from burnish.training import Trainer, run_folder
from oracles.same_state import assert_same_state
from oracles.tiny_program import CLASSES, FEATURES, tiny_program

PROGRAM = tiny_program()


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)


def samples(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(count) % CLASSES
    values = np.random.default_rng(0).normal(size=(count, FEATURES)) + labels[:, None]
    return values.astype(np.float32), labels


def trainer(folder: Path, **options: Any) -> Trainer:
    settings = {"epochs": 2, "batch_size": 8, "progress": False, "eval_split": 0.25} | options
    return Trainer(PROGRAM, settings.pop("data", samples()), run_directory=folder, **settings)


def test_a_run_with_a_part_held_out_is_one_with_two_data_sets(tmp_path: Path) -> None:
    x, labels = samples()
    split = trainer(tmp_path / "split")
    result = split.run()
    content = json.loads((tmp_path / "split" / "split.json").read_text())
    assert content["held_out"] == "held out 10 of 40 samples (stratified by class, seed 0)"
    evaluation = np.array(content["evaluation"])
    training = np.setdiff1d(np.arange(40), evaluation)
    given = (x[evaluation], labels[evaluation])
    other = trainer(tmp_path / "given", data=(x[training], labels[training]), eval_data=given, eval_split=None)
    assert other.run().metrics == result.metrics
    assert_same_state(other.session.state(), split.session.state())
    assert not (tmp_path / "given" / "split.json").exists()


def test_a_run_goes_on_with_the_part_that_it_kept(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", epochs=3)
    whole.run()
    trainer(tmp_path / "run").run()
    resumed = trainer(tmp_path / "run", epochs=3, resume=True)
    resumed.run()
    assert_same_state(resumed.session.state(), whole.session.state())
    with pytest.raises(ConfigurationError, match=r"with eval_split=0.25 and seed=0, and is now to go on with eval_split=0.5"):
        trainer(tmp_path / "run", epochs=4, resume=True, eval_split=0.5)
    with pytest.raises(CheckpointError, match=r"was started with eval_split=0.25, and is now to go on with eval_split=None"):
        trainer(tmp_path / "run", epochs=4, resume=True, eval_split=None)
    with pytest.raises(DataError, match=r"was started with 40 samples, .* and the data have 44 now"):
        trainer(tmp_path / "run", epochs=4, resume=True, data=samples(44))


def test_a_new_run_in_the_folder_drops_what_the_one_before_held_out(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    trainer(tmp_path, overwrite=True, eval_split=None).run()
    assert not (tmp_path / "split.json").exists()


def batches() -> Iterator[dict[str, np.ndarray]]:
    x, labels = samples(8)
    yield {"x": x, "labels": labels}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"eval_data": samples()}, ConfigurationError, r"eval_data \(--eval-data\) .* eval_split \(--eval-split\) .*: give one"),
        ({"data": Batches(batches, steps=1)}, ConfigurationError, "a stream of batches has none: give batches to evaluate on as"),
        ({"eval_split": 0}, ConfigurationError, "eval_split=0 .*: a share .* lies between 0 and 1: give a share, such as 0.2"),
        ({"eval_split": 1.5}, ConfigurationError, "eval_split=1.5 .*: a share .* lies between 0 and 1"),
        ({"eval_split": "group:nothing"}, DataError, "no columns by name: give arrays by input name, with 'nothing' among them"),
        ({"data": samples(1)}, DataError, "nothing can be held out"),
    ],
)
def test_what_cannot_be_held_out(tmp_path: Path, options: dict[str, Any], kind: type[BurnishError], message: str) -> None:
    with pytest.raises(kind, match=message):
        trainer(tmp_path, **options)


def test_the_remedy_for_groups_of_arrays(tmp_path: Path) -> None:
    x, labels = samples()
    arrays = {"x": x, "labels": labels, "nothing": np.arange(40) // 4}
    made = trainer(tmp_path, data=arrays, eval_split="group:nothing")
    made.run()
    held = json.loads((tmp_path / "split.json").read_text())
    assert held["eval_split"] == "group:nothing"
    assert sorted({number // 4 for number in held["evaluation"]}) == sorted(map(int, held["groups"]))


def test_finetune_holds_out_a_part_and_says_so(tmp_path: Path) -> None:
    x, labels = samples(60)
    model = create("mlp", classes=CLASSES, input_shape=(FEATURES,))
    told = {"epochs": 2, "lr": 0.1, "seed": 3, "batch_size": 8}
    tuned = burnish.finetune(model, (x, labels), eval_split=0.25, output=tmp_path / "a.onnx", **told)
    assert "held out 15 of 60 samples (stratified by class, seed 3)" in tuned.notes
    assert tuned.result.best is not None
    again = burnish.finetune(model, (x, labels), eval_split="0.25", output=tmp_path / "b.onnx", **told)
    assert again.result.metrics == tuned.result.metrics
    with pytest.raises(ConfigurationError, match=r"eval_data .* eval_split .*: give one of them"):
        burnish.finetune(model, (x, labels), eval_split=0.25, eval_data=(x, labels), output=tmp_path / "c.onnx")


def test_classes_of_the_whole_make_the_head_where_the_largest_is_rare(tmp_path: Path) -> None:
    x, _ = samples(60)
    labels = np.array([0, 1] * 29 + [2, 2])
    model = create("mlp", classes=2, input_shape=(FEATURES,))
    tuned = burnish.finetune(model, (x, labels), eval_split=0.2, epochs=1, lr=0.1, output=tmp_path / "a.onnx")
    assert any("re-initialized for 3 classes" in note for note in tuned.notes)
