"""Checkpoints: bitwise resumption, and files that are truncated, foreign, of another program or interrupted."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.state_file import read_state_file
from burnish.training import Session, read_checkpoint
from files.stamping import write_arrays
from oracles.same_state import assert_same_state
from oracles.tiny_program import tiny_batch, tiny_program

ENGINES = ["onnxruntime", "reference"]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def program():
    return tiny_program()


@pytest.fixture
def session(program):
    session = Session(program, threads=1)
    for number in range(3):
        session.step(tiny_batch(seed=number))
    return session


def refused(session, path, message):
    before = session.state()
    with pytest.raises(CheckpointError, match=message):
        session.restore(path)
    assert_same_state(session.state(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(program, engine, tmp_path):
    path = tmp_path / "run" / "last.safetensors"
    straight = Session(program, engine, threads=1, seed=4)
    losses = [straight.step(tiny_batch(seed=number)) for number in range(6)]
    first = Session(program, engine, threads=1, seed=4)
    for number in range(3):
        assert first.step(tiny_batch(seed=number)) == losses[number]
    first.save_checkpoint(path, extra={"epoch": 1, "order": [3, 1, 2]})
    resumed = Session(tiny_program(), engine, threads=1, seed=77)
    assert resumed.restore(path) == {"epoch": 1, "order": [3, 1, 2]}
    assert resumed.step_count == 3
    for number in range(3, 6):
        assert resumed.step(tiny_batch(seed=number)) == losses[number]
    assert_same_state(resumed.state(), straight.state())


def test_a_checkpoint_says_what_it_is(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.step, checkpoint.engine, checkpoint.extra) == (3, "onnxruntime", {})
    assert_same_state(checkpoint.state, session.state())
    assert_same_state(load_file(path), session.state())
    assert os.listdir(tmp_path) == ["last.safetensors"]


def test_a_checkpoint_of_one_engine_is_read_by_another(session, program, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    other = Session(program, "reference")
    other.restore(path)
    assert_same_state(other.state(), session.state())


def test_a_missing_checkpoint_is_named(session, tmp_path):
    refused(session, tmp_path / "none.safetensors", r"There is no checkpoint '.*none\.safetensors': check the path")
    refused(session, tmp_path, r"is a folder: give the name of a file")


def test_a_checkpoint_with_another_bit_in_its_arrays_is_refused(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused(session, path, r"last\.safetensors' is not a whole checkpoint: .*it has changed since it was written.*Use an earlier")


@pytest.mark.slow
def test_a_checkpoint_with_another_bit_anywhere_is_refused(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_a_checkpoint_without_a_digest_is_refused(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    state, metadata = read_state_file(path, "checkpoint")
    save_file(state, path, {key: text for key, text in metadata.items() if key != "burnish.digest"})
    refused(session, path, r"it has changed since it was written")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1, -40])
def test_a_truncated_checkpoint_is_refused(session, tmp_path, kept):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    refused(session, path, r"is not a whole checkpoint: it is truncated, damaged or another kind of file.*Use an earlier one")


def test_a_checkpoint_with_bytes_appended_is_refused(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    path.write_bytes(path.read_bytes() + b"more")
    refused(session, path, r"is not a whole checkpoint")


def test_sizes_are_checked_before_memory_is_taken(session, tmp_path):
    path = tmp_path / "huge.safetensors"
    header = json.dumps({"param/weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    refused(session, path, r"is not a whole checkpoint")
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    refused(session, path, r"is not a whole checkpoint")


class Payload:
    """Unpickling this would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", [0, 4])
def test_nothing_is_unpickled(session, tmp_path, protocol):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"state": Payload(tmp_path / "executed")}, protocol))
    refused(session, path, r"another kind of file")
    np.save(tmp_path / "array.npy", np.array([Payload(tmp_path / "executed")], dtype=object), allow_pickle=True)
    refused(session, tmp_path / "array.npy", r"another kind of file")
    assert not (tmp_path / "executed").exists()


def test_foreign_weights_are_not_a_checkpoint(session, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(session.state(), path)
    refused(session, path, r"is a safetensors file, but not a burnish checkpoint: give a file that save_checkpoint wrote")


def rewritten(path, state=None, **header):
    """Write a checkpoint again with another header or another state."""
    checkpoint, metadata = read_state_file(path, "checkpoint")
    write_arrays(path, checkpoint if state is None else state, {**metadata, **header})


def test_a_newer_format_is_named(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    rewritten(path, version="4")
    refused(session, path, r"is of format version 4, and this burnish reads version 3: update burnish")
    rewritten(path, version="1")
    refused(session, path, r"is of format version 1, and this burnish reads version 3: go on with the burnish that wrote it")


@pytest.mark.parametrize("header", [{"version": "x"}, {"step": "x"}, {"extra": "{"}, {"graphs": "[1]"}, {"extra": "3"}])
def test_a_damaged_header_is_named(session, tmp_path, header):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    rewritten(path, **header)
    refused(session, path, r"The header of the checkpoint .* is damaged .*use an earlier checkpoint")


def test_a_state_changed_behind_the_header_is_named(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    state = session.state()
    del state["param/bias"]
    rewritten(path, state)
    refused(session, path, r"does not fit the program: missing 'param/bias'\. It is damaged: use an earlier checkpoint")


def test_a_checkpoint_of_a_program_with_another_state_names_the_difference(session, program, tmp_path):
    path = tmp_path / "last.safetensors"
    wide = tiny_program(ir.DataType.DOUBLE)
    Session(wide, threads=1).save_checkpoint(path)
    refused(session, path, r"made with another program: 'param/weight' has dtype float64, expected float32")
    refused(session, path, r"or take over what fits: session\.restore\(path, strict=False\), or burnish train --start-from$")
    other = tiny_program()
    state, _ = Session(other).state(), None
    Session(other, state=state).save_checkpoint(path)
    state["param/gamma"] = state.pop("param/scale")
    rewritten(path, state, program="0" * 64)
    refused(session, path, r"another program: missing 'param/scale'; unknown 'param/gamma'\. Compile the model with the options")


def test_a_checkpoint_of_a_program_with_other_graphs_names_them(session, tmp_path):
    path = tmp_path / "last.safetensors"
    other = tiny_program()
    next(node for node in other.step.graph if node.op_type == "LogSoftmax").attributes["axis"] = ir.AttrInt64("axis", -1)
    Session(other, threads=1).save_checkpoint(path)
    refused(session, path, r"same names and shapes, but these graphs differ: step\. .*session\.load_state\(burnish")
    session.load_state(read_checkpoint(path).state)


def test_another_default_of_a_hyperparameter_is_the_same_program(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    slower = tiny_program()
    step = slower.signature.graphs["step"]
    inputs = tuple(replace(entry, default=0.01) if entry.name == "lr" else entry for entry in step.inputs)
    slower.signature.graphs["step"] = replace(step, inputs=inputs)
    Session(slower, threads=1).restore(path)


def test_a_state_with_nan_does_not_replace_a_checkpoint(session, tmp_path):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content = path.read_bytes()
    overflowed = session.state()
    overflowed["param/bias"][1] = np.inf
    session.load_state(overflowed)
    with pytest.raises(CheckpointError, match=r"No checkpoint was written to .*'param/bias' holds NaN or infinite values"):
        session.save_checkpoint(path)
    assert path.read_bytes() == content


def test_names_that_no_file_can_have_are_refused(session, tmp_path):
    for name, message in (
        ("a\0b", "has a null character: give the name of a file"),
        ("x" * 5000, "could not be written: .*too long"),
    ):
        with pytest.raises(CheckpointError, match=message):
            session.save_checkpoint(tmp_path / name)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"order": np.arange(3)}, "ndarray"),
        ({"name": "\ud800"}, "surrogates"),
        ({1: "one", "1": "another"}, "the key '1' twice"),
        ({"lists": functools.reduce(lambda inner, _: [inner], range(200), 0)}, "lists and objects"),
    ],
)
def test_extra_that_could_not_be_read_again_is_refused(session, tmp_path, extra, message):
    with pytest.raises(ConfigurationError, match=rf"extra of the checkpoint .* is not JSON: .*{message}"):
        session.save_checkpoint(tmp_path / "last.safetensors", extra=extra)
    session.metadata["classes"] = "\ud800"
    with pytest.raises(ConfigurationError, match=r"metadata of the checkpoint .* is not JSON: .*surrogates"):
        session.save_checkpoint(tmp_path / "last.safetensors")
    assert not os.listdir(tmp_path)


def test_a_folder_is_not_a_checkpoint_name(session, tmp_path):
    with pytest.raises(CheckpointError, match=r"is a folder: give the name of a file, such as '.*last\.safetensors'"):
        session.save_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"The folder of '.*' cannot be made.*Choose a folder you can write to"):
        session.save_checkpoint(tmp_path / "file" / "last.safetensors")


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_save_that_fails_keeps_the_earlier_file(session, tmp_path, monkeypatch, function):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content, state = path.read_bytes(), session.state()
    session.step(tiny_batch(seed=5))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(CheckpointError, match=r"could not be written: .*No space left.*earlier file there is untouched"):
            session.save_checkpoint(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["last.safetensors"]
    session.restore(path)
    assert_same_state(session.state(), state)


def test_an_interrupted_save_keeps_the_earlier_file(session, tmp_path, monkeypatch):
    path = tmp_path / "last.safetensors"
    session.save_checkpoint(path)
    content = path.read_bytes()
    session.step(tiny_batch(seed=5))

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.save_checkpoint(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["last.safetensors"]
    session.save_checkpoint(path)
    assert path.read_bytes() != content


KILLED = """
import os, signal, sys
from oracles.tiny_program import tiny_batch, tiny_program
from burnish.training import Session

session = Session(tiny_program(), threads=1)
session.step(tiny_batch())
session.save_checkpoint(sys.argv[1])
session.step(tiny_batch())
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
session.save_checkpoint(sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_the_earlier_checkpoint(program, tmp_path):
    path = tmp_path / "last.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, path], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = set(os.listdir(tmp_path))
    assert len(left) == 2
    assert all(not name.endswith(".safetensors") for name in left - {"last.safetensors"})
    session = Session(program, threads=1)
    session.restore(path)
    assert session.step_count == 1
    session.step(tiny_batch())
    session.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["last.safetensors"]
    session.restore(path)
    assert session.step_count == 2


def test_partial_files_of_other_names_stay(session, tmp_path):
    others = {".first.safetensors.0123abcd.partial", ".last.safetensors.partial", ".last.safetensors.0123abcd.data"}
    for name in others:
        (tmp_path / name).touch()
    session.save_checkpoint(tmp_path / "last.safetensors")
    assert set(os.listdir(tmp_path)) == {*others, "last.safetensors"}


RESUMED = """
import sys
import numpy as np
import burnish
from burnish.models.residual import residual_network
from burnish.training import Session

program = burnish.compile(residual_network((1, 8, 8), width=2, blocks=(1, 1)), optimizer="adamw")
session = Session(program, threads=1)
rng = np.random.default_rng(0)
batches = [{"x": rng.normal(size=(8, 1, 8, 8)), "labels": np.arange(8)} for _ in range(2)]
if sys.argv[2] == "save":
    session.step(batches[0])
    session.save_checkpoint(sys.argv[1])
else:
    session.restore(sys.argv[1])
print(session.step(batches[1]))
"""


@pytest.mark.slow
def test_a_program_compiled_again_in_another_process_takes_over_bitwise(tmp_path):
    """Nothing in a program may depend on the order of a set: Python's hashes differ from process to process."""
    results = []
    for seed, what in (("1", "save"), ("2", "restore")):
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", RESUMED, tmp_path / "last.safetensors", what]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        results.append(run.stdout)
    assert results[0] == results[1]
