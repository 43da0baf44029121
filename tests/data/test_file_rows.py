"""Rows of arrays in files: read by their places, so that a file that changes is an error, and no signal that ends the process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.data import ArrayDataset, Loader, file_rows, open_dataset
from burnish.errors import DataError
from burnish.training import read_checkpoint
from burnish.training.feature_dataset import FeatureDataset
from oracles.tiny_program import CLASSES, FEATURES, tiny_program
from specs.program_inputs import classification

WIDE = 4096
"""Numbers of a row that is read each time; smaller ones are read once."""


def saved(path: Path, array: np.ndarray) -> np.memmap:
    np.save(path, array)
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("columns", [3, WIDE])
@pytest.mark.parametrize("indices", [[4, 1, 1], [2, 3, 4], [-1, 0], [], [5, 4, 3]])
def test_rows_are_those_of_the_array(tmp_path, columns, indices):
    array = np.random.default_rng(0).normal(size=(6, columns)).astype(">f4")
    rows = file_rows.file_rows(saved(tmp_path / "x.npy", array))
    read = pickle.loads(pickle.dumps(rows))[np.array(indices, np.int64)]
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array[indices])


def test_a_system_without_preadv_reads_the_same(tmp_path, monkeypatch):
    array = np.random.default_rng(0).normal(size=(6, WIDE))
    rows = file_rows.file_rows(saved(tmp_path / "x.npy", array))
    monkeypatch.delattr(os, "preadv", raising=False)
    np.testing.assert_array_equal(rows[np.array([4, 0])], array[[4, 0]])


def test_what_is_no_rows_of_a_file(tmp_path):
    mapped = saved(tmp_path / "x.npy", np.arange(12.0).reshape(4, 3))
    part = file_rows.file_rows(np.asarray(mapped)[1:3])
    np.testing.assert_array_equal(part[np.array([1, 0])], [[6, 7, 8], [3, 4, 5]])
    assert file_rows.file_rows(mapped.T) is None
    assert file_rows.file_rows(np.array(mapped)) is None
    assert file_rows.file_rows(np.memmap(tmp_path / "x.npy", np.uint8, "c")) is None
    with pytest.raises(IndexError, match="no row 4; it has 4"):
        file_rows.FileRows(tmp_path / "x.npy", mapped.dtype, mapped.shape, mapped.offset, writable=True)[np.array([4])]


@pytest.mark.parametrize("columns", [3, WIDE])
def test_a_file_that_is_cut_while_it_is_read(tmp_path, columns):
    features = np.ones((40, columns), np.float32)
    np.save(tmp_path / "x.npy", features)
    np.save(tmp_path / "y.npy", np.zeros(40, np.int64))
    dataset = open_dataset(tmp_path, classification(columns))
    in_memory = ArrayDataset({"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "labels": np.zeros(40, np.int64)})
    whole = (tmp_path / "x.npy").read_bytes()
    os.truncate(tmp_path / "x.npy", 256)
    for each in (dataset, in_memory):
        with pytest.raises(DataError, match=r"x\.npy: holds 256 of the [\d,]+ bytes that it had when it was opened.*put the"):
            each.batch(np.array([39, 2]))
    (tmp_path / "x.npy").write_bytes(whole)
    assert dataset.batch(np.array([39]))["x"].tolist() == features[:1].tolist()


@pytest.mark.slow
def test_a_reading_process_meets_a_file_that_was_cut(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((40, WIDE), np.float32))
    np.save(tmp_path / "y.npy", np.zeros(40, np.int64))
    loader = Loader(open_dataset(tmp_path, classification(WIDE)), 8, processes=1)
    try:
        os.truncate(tmp_path / "x.npy", 4096)
        with pytest.raises(DataError, match=r"x\.npy: holds 4,096 of the"):
            list(loader.epoch(0))
    finally:
        loader.close()


def test_a_disk_that_fails(tmp_path, monkeypatch):
    rows = file_rows.file_rows(saved(tmp_path / "x.npy", np.ones((4, WIDE))))

    def failing(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing, raising=False)
    with pytest.raises(DataError, match=r"x\.npy: cannot be read any more \(Input/output error\); put it on a disk that is"):
        rows[np.array([2])]


@pytest.mark.slow
def test_a_run_whose_data_are_cut_keeps_its_state(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "x.npy", np.random.default_rng(0).normal(size=(24, FEATURES)).astype(np.float32))
    np.save(data / "y.npy", np.arange(24) % CLASSES)
    options = {"batch_size": 4, "epochs": 2, "run_directory": tmp_path / "run", "progress": False}

    class Cut(burnish.training.callbacks.Callback):
        def on_step_end(self, run, step):
            if step.step == 3:
                os.truncate(data / "x.npy", 200)

    whole = (data / "x.npy").read_bytes()
    run = burnish.Trainer(tiny_program(), str(data), callbacks=[Cut()], **options)
    with pytest.raises(DataError, match=r"x\.npy: holds 200 of .* batch 4; the state before it is saved in '.*latest"):
        run.run()
    assert read_checkpoint(run.latest).step == 3
    with pytest.raises(DataError, match=r"x\.npy: damaged"):
        burnish.Trainer(tiny_program(), str(data), resume=True, **options)
    (data / "x.npy").write_bytes(whole)
    assert burnish.Trainer(tiny_program(), str(data), resume=True, **options).run().steps == 12


def test_features_in_a_file_that_is_cut_or_has_no_room(tmp_path, monkeypatch):
    dtype, shape = np.dtype(np.float32), (8, 4)
    (tmp_path / "train.features").write_bytes(b"")
    rows = file_rows.FileRows(tmp_path / "train.features", dtype, shape, 0, writable=True)
    values = np.arange(32, dtype=dtype).reshape(shape)
    rows.write(0, values[:3])
    rows.write(3, values[3:])
    np.testing.assert_array_equal(rows[np.array([6, 1])], values[[6, 1]])
    dataset = FeatureDataset(ArrayDataset({"x": values}), "train")
    dataset._arrays = {"feature": rows}
    os.truncate(tmp_path / "train.features", 10)
    with pytest.raises(DataError, match=r"train\.features: holds 10 of the 128 bytes"):
        dataset.batch(np.array([7]))
    full = file_rows.FileRows("/dev/full", dtype, shape, 0, writable=True)
    with pytest.raises(DataError, match=r"/dev/full: cannot be written \(No space left on device\); make room"):
        full.write(0, values)


def test_a_header_that_is_no_python(tmp_path):
    np.save(tmp_path / "y.npy", np.zeros(3, np.int64))
    content = (tmp_path / "y.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content.replace(b"}", b"("))
    with pytest.raises(DataError, match=r"x\.npy: damaged, no \.npy file, or one of Python objects"):
        open_dataset(tmp_path, classification(2))
