"""A run that goes on finds the data that it was started with, or says that they are others."""

from __future__ import annotations

import re

import numpy as np
import pytest

import burnish
from burnish.data import ArrayDataset
from burnish.errors import CheckpointError, DataError
from burnish.training import read_checkpoint
from burnish.training.run_folder import ROWS_COMPARED, fingerprint
from oracles.tiny_program import CLASSES, FEATURES, tiny_program

PROGRAM = tiny_program()


def samples(count: int = 30, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(count, FEATURES)).astype(np.float32)
    return {"x": features, "labels": generator.integers(0, CLASSES, count)}


def trainer(folder, data, **options):
    return burnish.Trainer(PROGRAM, data, epochs=2, batch_size=10, run_directory=folder, progress=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"x": samples(seed=1)["x"]}, {"labels": samples()["labels"][::-1].copy()}])
def test_other_data_are_refused_and_may_begin_a_new_run(tmp_path, change):
    run = trainer(tmp_path / "run", samples())
    run.run()
    assert len(read_checkpoint(run.latest).extra["data"]) == ROWS_COMPARED
    others = {**samples(), **change}
    message = r"started with other data: sample \d+ has changed since\. .* \(start_from, --start-from '(.*latest\.safetensors)'\)"
    with pytest.raises(DataError, match=message) as error:
        trainer(tmp_path / "run", others, resume=True)
    new = trainer(tmp_path / "new", others)
    new.start_from(re.search(message, str(error.value))[1])
    assert new.run().steps == 6
    assert trainer(tmp_path / "run", samples(), resume=True).finished


def test_a_data_set_that_grew_is_refused(tmp_path):
    trainer(tmp_path, samples()).run()
    grown = {name: np.concatenate([array, array[:1]]) for name, array in samples().items()}
    with pytest.raises(
        CheckpointError, match=r"started with samples=30, and is now to go on with samples=31: .* start a new run"
    ):
        trainer(tmp_path, grown, resume=True)


@pytest.mark.slow
def test_what_cannot_be_read_or_is_not_finite_may_be_repaired(tmp_path):
    class Damaged(ArrayDataset):
        def batch(self, indices):
            if 0 in indices:
                raise DataError("image-0.png: damaged")
            return super().batch(indices)

    data = samples()
    data["x"][-1] = np.nan
    found = fingerprint(Damaged(data))
    assert "0" not in found
    assert "29" not in found
    assert len(found) == ROWS_COMPARED - 2
    with pytest.raises(DataError, match=r"image-0\.png: damaged"):
        trainer(tmp_path, Damaged(data)).run()
    assert trainer(tmp_path, samples(), resume=True).run().steps == 6


@pytest.mark.slow
def test_samples_that_differ_each_time_are_not_compared(tmp_path):
    class Noisy(ArrayDataset):
        def batch(self, indices):
            batch = super().batch(indices)
            return {**batch, "x": batch["x"] + np.random.default_rng().normal(size=batch["x"].shape).astype(np.float32)}

    assert fingerprint(Noisy(samples())) == {}
    trainer(tmp_path, Noisy(samples())).run()
    assert trainer(tmp_path, Noisy(samples(seed=1)), resume=True).finished
