"""The file of a state: what safetensors reads and writes, made of one array at a time."""

from __future__ import annotations

import hashlib
import json
import struct
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.errors import CheckpointError
from burnish.files import state_file
from burnish.files.state_file import DTYPES, StateFile, read_state_file, write_state_file
from burnish.program.state import LazyArrays

ARRAYS = {
    "step": np.asarray(3, np.int64),
    "mask": np.array([True, False, True]),
    "param/b": np.arange(5, dtype=np.float32),
    "param/a": np.arange(7, dtype=np.float16),
    "opt/m/ü": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "empty": np.zeros((0, 4), np.float32),
}


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name


def header_of(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), 8 + size


@pytest.mark.parametrize("block", [1, 12, 1 << 22])
def test_safetensors_reads_what_is_written(tmp_path, monkeypatch, block):
    monkeypatch.setattr(state_file, "BLOCK", block)
    path = tmp_path / "state.safetensors"
    write_state_file(path, ARRAYS, {"format": "a"})
    assert_same(load_file(path), ARRAYS)
    arrays, metadata = read_state_file(path, "state file")
    assert_same(arrays, ARRAYS)
    digest = metadata["burnish.digest"]
    blank = path.read_bytes().replace(digest.encode(), b"sha256:" + b"0" * 64)
    assert metadata == {"burnish.digest": "sha256:" + hashlib.sha256(blank).hexdigest(), "format": "a"}


def test_what_safetensors_writes_is_read(tmp_path):
    path = tmp_path / "state.safetensors"
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in ARRAYS.items()}
    save_file(contiguous, path, {"format": "a"})
    arrays, metadata = read_state_file(path, "state file")
    assert_same(arrays, contiguous)
    assert metadata == {"format": "a"}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name):
    arrays = {"a": np.arange(2).astype(DTYPES[name])}
    write_state_file(tmp_path / "state.safetensors", arrays, {})
    assert_same(read_state_file(tmp_path / "state.safetensors", "state file")[0], arrays)


def test_a_dtype_that_the_format_has_no_name_for(tmp_path):
    with pytest.raises(CheckpointError, match="'a' is of int4, which a safetensors file cannot hold"):
        write_state_file(tmp_path / "state.safetensors", {"a": np.zeros(2, ml_dtypes.int4)}, {})
    assert not list(tmp_path.iterdir())


def test_arrays_are_aligned_and_without_gaps(tmp_path):
    path = tmp_path / "state.safetensors"
    write_state_file(path, ARRAYS, {})
    header, begin = header_of(path)
    assert begin % 8 == 0
    places = sorted((*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    assert all(start % ARRAYS[name].itemsize == 0 for start, _, name in places)
    assert [start for start, _, _ in places] == [0, *(end for _, end, _ in places[:-1])]
    assert begin + places[-1][1] == path.stat().st_size


class Watched(LazyArrays):
    """Arrays that say how many of them were in memory at once, and how often each was asked for."""

    def __init__(self, arrays):
        self.arrays, self.alive, self.most, self.asked = arrays, 0, 0, []

    def __getitem__(self, name):
        array = self.arrays[name].copy()
        self.alive += 1
        self.most = max(self.most, self.alive)
        self.asked.append(name)
        weakref.finalize(array, self.leave)
        return array

    def leave(self):
        self.alive -= 1

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)

    def kind(self, name):
        return self.arrays[name].dtype, self.arrays[name].shape


def test_one_array_is_in_memory_at_a_time(tmp_path):
    watched = Watched({f"param/{index}": np.full(100, index, np.float32) for index in range(5)})
    path = tmp_path / "state.safetensors"
    write_state_file(path, watched, {})
    assert sorted(watched.asked) == sorted(watched.arrays)
    assert watched.most <= 2  # the next is made before the last is let go
    assert_same(load_file(path), watched.arrays)


def test_what_a_check_raises_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "state.safetensors"
    write_state_file(path, ARRAYS, {})
    before = path.read_bytes()

    def check(name, part):
        if name == "param/b":
            raise CheckpointError(f"not {name}")

    with pytest.raises(CheckpointError, match="not param/b"):
        write_state_file(path, ARRAYS, {"format": "another"}, check=check)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    path = tmp_path / "state.safetensors"
    write_state_file(path, {"param/a": np.zeros(1 << 20, np.float32)}, {})
    with StateFile(path, "checkpoint") as file:
        with path.open("r+b") as changed:
            changed.truncate(header_of(path)[1])
        with pytest.raises(CheckpointError, match=r"is not a whole checkpoint: .*it ends too early.*Use an earlier one"):
            file["param/a"]
