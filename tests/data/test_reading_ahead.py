"""Batches that processes read ahead: the same, whatever their number; faults are raised where the batch is waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from burnish.data import ArrayDataset, Loader, open_dataset, read_ahead
from burnish.data.image.augmentation import read_augmentation
from burnish.errors import ConfigurationError, DataError
from data.reading_faults import Numbered
from specs.program_inputs import classification


@pytest.mark.slow
def test_two_processes_give_the_batches_of_none(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(5):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "3.png").write_bytes(b"no image")
    here = open_dataset(tmp_path, classification(3, 8, 8)).augmented_by(read_augmentation("crop,flip,rand_augment"))
    ahead = open_dataset(tmp_path, classification(3, 8, 8)).augmented_by(here.augmentation)
    loader, alone = Loader(ahead, 3, seed=4, processes=2), Loader(here, 3, seed=4)
    threads = threading.active_count()
    for epoch, start in ((0, 0), (1, 2)):
        for expected, batch in zip(alone.epoch(epoch, start), loader.epoch(epoch, start), strict=True):
            assert expected.keys() == batch.keys()
            for name, array in expected.items():
                assert array.dtype == batch[name].dtype
                np.testing.assert_array_equal(array, batch[name])
    assert ahead.remark == here.remark
    assert "1 of 10 images cannot be read" in str(here.remark)
    next(loader.epoch(2))  # left in its midst
    loader.close()
    assert threading.active_count() == threads
    assert len(list(loader.epoch(3))) == 4  # in this process


@pytest.mark.slow
def test_a_fault_is_raised_where_its_batch_is_waited_for():
    """A process goes on after what a data set raises; one that dies is named, now and in the next epoch."""
    loader = Loader(Numbered(faults=True), 2, shuffle=False, processes=1)
    batches = loader.epoch(0)
    assert [next(batches)["names"].tolist() for _ in range(2)] == [["n0", "n1"], ["n2", "n3"]]
    with pytest.raises(DataError, match="the data set raised ValueError: five"):
        next(batches)
    with pytest.raises(DataError, match=r"^seven\.png: no good$"):
        next(loader.epoch(0, start=3))
    for _ in range(2):
        with pytest.raises(DataError, match=r"that reads data ended by signal 9 at batch 0 of those asked for.*--data-workers 0"):
            next(loader.epoch(0, start=4))
    loader.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system does not tell which child is stopped")
def test_a_process_that_is_stopped_is_named(monkeypatch):
    monkeypatch.setattr(read_ahead, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(read_ahead, "STOPPED_SECONDS", 0.0)
    loader = Loader(Numbered(faults=True), 2, shuffle=False, processes=1)
    pid = loader._reader._processes[0].pid
    with pytest.raises(DataError, match=rf"stood still for 0 s, stopped by a signal \(SIGSTOP\), at batch 0 .*process {pid}"):
        next(loader.epoch(0, start=5))
    loader.close()


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them():
    """Also where that is killed: their input ends."""
    code = (
        "import os, signal\nfrom burnish.data import Loader\nfrom data.reading_faults import Numbered\n"
        "loader = Loader(Numbered(), 2, processes=1)\nnext(loader.epoch(0))\n"
        "print(loader._reader._processes[0]._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folders = os.pathsep.join(path for path in sys.path if path)  # that of the tests too, which pytest has put there
    environment = os.environ | {"PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    # The reading process holds this end of the pipe for what it prints: that the call returned says that it is gone.
    assert int(done.stdout.split()[-1]) > 0
    assert "a library says something" in done.stderr


def test_what_processes_cannot_read():
    class Local(Numbered):
        pass

    with pytest.raises(ConfigurationError, match=r"of type Local cannot be sent to other processes .*data_workers=0"):
        Loader(Local(), 2, processes=1)
    with pytest.raises(ConfigurationError, match="processes=-1: give a whole number"):
        Loader(Numbered(), 2, processes=-1)
    arrays = Loader(ArrayDataset({"x": np.arange(4)}), 2, processes=2)
    assert arrays._reader is None
