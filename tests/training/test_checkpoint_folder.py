"""The checkpoints of a run: the rolling set, falling back on an earlier one, the best by a named metric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.errors import CheckpointError, ConfigurationError
from burnish.models import residual_network
from burnish.training import read_checkpoint
from burnish.training.callbacks import Callback


@pytest.fixture(scope="module")
def program() -> burnish.Program:
    return burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.05, momentum=0.9), metrics=("accuracy", "top_3"))


def trainer(program: burnish.Program, folder: Path, **options) -> burnish.Trainer:
    generator = np.random.default_rng(1)
    data = generator.normal(size=(24, 1, 8, 8)).astype(np.float32), generator.integers(0, 10, 24)
    settings = {"epochs": 2, "batch_size": 4, "checkpoint_every": 1, "threads": 1, "progress": False}
    return burnish.Trainer(program, data, run_directory=folder, **{**settings, **options})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_rolling_set_is_kept(program, tmp_path):
    trainer(program, tmp_path, keep_checkpoints=3).run()
    steps = [f"step-{step:08d}.safetensors" for step in (10, 11, 12)]
    assert names(tmp_path) == ["best.safetensors", "latest.safetensors", *steps]
    checkpoints = tmp_path / "checkpoints"
    assert [read_checkpoint(checkpoints / name).step for name in steps] == [10, 11, 12]
    assert (checkpoints / steps[-1]).read_bytes() == (checkpoints / "latest.safetensors").read_bytes()


@pytest.mark.slow
def test_by_default_there_is_one(program, tmp_path):
    trainer(program, tmp_path).run()
    assert names(tmp_path) == ["best.safetensors", "latest.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_save_left_is_removed(program, tmp_path, resume):
    """A process killed in its very first save leaves no checkpoint to resume, only files that are half written."""
    if resume:
        trainer(program, tmp_path, epochs=1).run()
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for name in (".tmpclZ8AX", ".latest.safetensors.0123abcd.partial", ".step-00000001.safetensors.0123abcd.partial"):
        (checkpoints / name).write_bytes(b"half")
    (checkpoints / ".tmp-of-another").write_bytes(b"not burnish's")
    trainer(program, tmp_path, resume=resume).run()
    assert names(tmp_path) == [".tmp-of-another", "best.safetensors", "latest.safetensors"]


@pytest.mark.slow
def test_another_number_drops_what_is_too_many(program, tmp_path):
    trainer(program, tmp_path, keep_checkpoints=4, epochs=1).run()
    trainer(program, tmp_path, keep_checkpoints=2, resume=True).run()
    assert [name for name in names(tmp_path) if name.startswith("step")] == [
        "step-00000011.safetensors",
        "step-00000012.safetensors",
    ]


@pytest.mark.slow
def test_a_damaged_latest_falls_back_on_the_one_before_and_ends_the_same(program, tmp_path):
    trainer(program, tmp_path / "whole").run()
    run = tmp_path / "damaged"
    trainer(program, run, keep_checkpoints=3, epochs=1).run()
    for name in ("latest", "step-00000006"):
        path = run / f"checkpoints/{name}.safetensors"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
    resumed = trainer(program, run, keep_checkpoints=3, resume=True)
    assert resumed.session.step_count == 5
    notes = [note for note in resumed._notes if "Passed over" in note]
    assert len(notes) == 2
    assert "latest.safetensors' is not a whole checkpoint" in notes[0]
    resumed.run()
    expected = read_checkpoint(tmp_path / "whole/checkpoints/latest.safetensors").state
    for name, array in read_checkpoint(run / "checkpoints/latest.safetensors").state.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.slow
def test_where_all_are_damaged_the_newest_is_named(program, tmp_path):
    trainer(program, tmp_path, keep_checkpoints=2, epochs=1).run()
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
        path.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"latest\.safetensors' is not a whole checkpoint"):
        trainer(program, tmp_path, keep_checkpoints=2, resume=True)


@pytest.mark.slow
def test_a_new_run_clears_the_rolling_set(program, tmp_path):
    trainer(program, tmp_path, keep_checkpoints=4).run()
    trainer(program, tmp_path, epochs=1, checkpoint_every=None, overwrite=True).run()
    assert names(tmp_path) == ["best.safetensors", "latest.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["loss", "accuracy", "top_3"])
def test_the_best_epoch_by_a_named_metric(program, tmp_path, metric):
    result = trainer(program, tmp_path, epochs=4, best_metric=metric).run()
    # The last row of an epoch averages over the batches since the row before; a row per batch gives the epoch's mean.
    per_epoch = {}
    for row in result.history:
        per_epoch.setdefault(row["epoch"], []).append(row[metric])
    means = {epoch: float(np.mean(values)) for epoch, values in per_epoch.items()}
    best = min(means.values()) if metric == "loss" else max(means.values())
    assert result.best["metric"] == metric
    assert result.best["value"] == pytest.approx(best, rel=1e-6)
    assert means[result.best["epoch"]] == pytest.approx(best, rel=1e-6)


@pytest.mark.slow
def test_the_best_that_is_the_latest_is_written_once(program, tmp_path):
    """Unless a callback is told of the first of the two files: it may do something between."""

    class Told(Callback):
        def on_checkpoint(self, run, path):
            pass

    def same(folder: Path, **options) -> bool:
        result = trainer(program, folder, epochs=1, checkpoint_every=None, **options).run()
        best, latest = (folder / "checkpoints" / name for name in ("best.safetensors", "latest.safetensors"))
        assert result.best is not None
        assert best.read_bytes() == latest.read_bytes()
        return best.samefile(latest)

    assert same(tmp_path / "alone")
    assert not same(tmp_path / "told", callbacks=[Told()])


@pytest.mark.slow
def test_without_hard_links_the_best_is_copied(program, tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr("os.link", refused)
    run = trainer(program, tmp_path, epochs=1, checkpoint_every=None, keep_checkpoints=2)
    run.run()
    assert not run.best.samefile(run.latest)
    assert read_checkpoint(run.best).step == read_checkpoint(run.latest).step == 6


def test_an_unknown_best_metric_is_named(program, tmp_path):
    with pytest.raises(ConfigurationError, match=r"reports no 'f1'; it reports 'accuracy', 'top_3', 'loss'"):
        trainer(program, tmp_path, best_metric="f1")


def test_no_number_of_checkpoints_is_refused(program, tmp_path):
    with pytest.raises(ConfigurationError, match="keep_checkpoints=0: give a whole number"):
        trainer(program, tmp_path, keep_checkpoints=0)
