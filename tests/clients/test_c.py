"""The C client beside Python's session, on one ONNX Runtime library: the same bits, the same files, the same errors."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import c_library
import numpy as np
import onnxruntime
import programs
import pytest
import vectors

import burnish
from burnish.errors import CheckpointError
from oracles.combinations import spread
from oracles.same_state import assert_same_state
from oracles.standard_operators import STANDARD

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def python_session(name: str) -> burnish.Session:
    return burnish.Session(programs.program(name)[0], engine=STANDARD, threads=1)


QUICK = ("dropout", "mobile")
SLOW = tuple(pytest.param(name, marks=pytest.mark.slow) for name in programs.PROGRAMS if name not in QUICK)


@spread("name", [*QUICK, *SLOW], test=1)
def test_steps_and_checkpoints_are_pythons_bit_for_bit(client, folder, tmp_path, name: str) -> None:
    batch = programs.program(name)[1]
    steps = 100 if name == "dropout" else 5
    theirs, ours = python_session(name), client.open(folder(name))
    assert_same_state(ours.state(), theirs.state())
    for _ in range(steps):
        assert {key: value.item() for key, value in ours.step(batch).items()} == theirs.step(batch)
    assert_same_state(ours.state(), theirs.state())
    assert ours.step_count == steps
    ours.save(tmp_path / "c.safetensors", '{"batch": 3}')
    theirs.save_checkpoint(tmp_path / "python.safetensors", extra={"batch": 3})
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    resumed, other = client.open(folder(name), seed=5), python_session(name)
    assert json.loads(resumed.restore(tmp_path / "python.safetensors")) == {"batch": 3}
    assert other.restore(tmp_path / "c.safetensors") == {"batch": 3}
    expected = ours.step(batch)
    assert resumed.step(batch) == expected
    assert other.step(batch) == {key: value.item() for key, value in expected.items()}
    assert_same_state(resumed.state(), other.state())
    for opened in (ours, resumed):
        opened.close()


@pytest.mark.parametrize("name", ["mobile", *SLOW])
def test_an_export_is_pythons(client, folder, tmp_path, name: str) -> None:
    batch = programs.program(name)[1]
    theirs, ours = python_session(name), client.open(folder(name))
    for _ in range(2):
        theirs.step(batch)
        ours.step(batch)
    theirs.export(tmp_path / "python.onnx", fold_norm=False)
    ours.export(tmp_path / "c.onnx")
    inputs = {entry.name: batch[entry.name] for entry in theirs.program.signature["predict"].inputs if entry.name in batch}
    models = [onnxruntime.InferenceSession(tmp_path / file) for file in ("python.onnx", "c.onnx")]
    python, c = (model.run(None, inputs) for model in models)
    for one, other in zip(python, c, strict=True):
        assert one.tobytes() == other.tobytes()
    weights = [
        {item.name for item in burnish.load(tmp_path / file).graph.initializers.values()} for file in ("python.onnx", "c.onnx")
    ]
    assert {entry.removeprefix("param/") for entry in ours.state() if entry.startswith("param/")} <= weights[1] == weights[0]
    predicted = ours.predict(batch)
    for key, value in theirs.predict(batch).items():
        assert predicted[key].tobytes() == value.tobytes()
    ours.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Path:
    """A program of a model with adapters, whose merged export C does not make."""
    path = tmp_path_factory.mktemp("adapters") / "program"
    vectors.PROGRAMS["adapters"]().save(path)
    return path


def test_a_graph_is_exported_as_it_trains_where_that_is_asked_for(client, adapters, tmp_path) -> None:
    opened, batch = client.open(adapters), vectors.batch_of({"program": "adapters"})
    for _ in range(2):
        opened.step(batch)
    opened.export(tmp_path / "tuned.onnx", c_library.AS_TRAINED)
    (logits,) = onnxruntime.InferenceSession(tmp_path / "tuned.onnx").run(["logits"], {"x": batch["x"]})
    assert logits.tobytes() == opened.predict(batch)["logits"].tobytes()
    assert "first.lora_A.weight" in burnish.load(tmp_path / "tuned.onnx").graph.initializers
    with pytest.raises(c_library.ClientError, match=r"ConfigurationError: flags is 4: give 0 or BURNISH_AVERAGE, and to"):
        opened.export(tmp_path / "tuned.onnx", c_library.AS_TRAINED | 4)
    with pytest.raises(c_library.ClientError, match=r"ConfigurationError: BURNISH_AVERAGE: .* keeps no average"):
        opened.export(tmp_path / "tuned.onnx", c_library.AS_TRAINED | c_library.AVERAGE)
    opened.close()


@pytest.mark.slow
def test_a_large_export_keeps_its_weights_beside_it(folder, tmp_path) -> None:
    flags = ("-DBURNISH_ONE_FILE_LIMIT=100",)
    opened = c_library.Client(c_library.build(tmp_path, "libsmall.so", flags=flags)).open(folder("mobile"))
    batch = programs.program("mobile")[1]
    opened.export(tmp_path / "first.onnx")
    opened.step(batch)
    opened.export(tmp_path / "tuned.onnx")
    (data,) = tmp_path.glob("tuned.onnx-*.data")
    opened.step(batch)
    opened.export(tmp_path / "tuned.onnx")
    (later,) = tmp_path.glob("tuned.onnx-*.data")
    assert data != later
    outputs = onnxruntime.InferenceSession(tmp_path / "tuned.onnx").run(None, {"x": batch["x"]})
    np.testing.assert_allclose(outputs[0], opened.predict(batch)["logits"], rtol=1e-4, atol=1e-5)
    opened.close()


def test_evaluation_and_the_average_are_pythons(client, folder, tmp_path, session) -> None:
    batch = programs.program("dropout")[1]
    theirs = python_session("dropout")
    for _ in range(3):
        theirs.step(batch)
        session.step(batch)
    for flags, parameters in ((0, None), (c_library.AVERAGE, "average")):
        outputs = session.evaluate(batch, flags)
        totals = {**theirs.evaluate(batch, parameters), **theirs.evaluate_totals(batch, parameters)}
        assert outputs == totals
    assert session.evaluate(batch)["loss"] != session.evaluate(batch, c_library.AVERAGE)["loss"]
    session.export(tmp_path / "average.onnx", c_library.AVERAGE)
    theirs.export(tmp_path / "python.onnx", parameters="average")
    exported = [burnish.load(tmp_path / file).graph.initializers for file in ("average.onnx", "python.onnx")]
    for name, value in exported[1].items():
        assert exported[0][name].const_value.numpy().tobytes() == value.const_value.numpy().tobytes()
    plain = client.open(folder("mobile"))
    with pytest.raises(c_library.ClientError, match=r"ConfigurationError: BURNISH_AVERAGE: the .* keeps no average"):
        plain.evaluate(programs.program("mobile")[1], c_library.AVERAGE)
    plain.close()


def test_a_state_that_is_written_is_read_back_and_trained_from(client, folder) -> None:
    session, other = client.open(folder("mobile")), client.open(folder("mobile"))
    batch = programs.program("mobile")[1]
    session.step(batch)
    for name, array in session.state().items():
        other.write_state(name, array)
    assert other.step(batch) == session.step(batch)
    session.set("lr", 0.0)
    before = session.state_entry("param/head.weight")
    batch = {**batch, "x": batch["x"] + 1}
    session.step(batch)
    theirs = python_session("mobile")
    theirs.load_state(other.state())
    theirs.step(batch, lr=0.0)
    assert session.state_entry("param/head.weight").tobytes() == theirs.state()["param/head.weight"].tobytes()
    assert before.shape == theirs.state()["param/head.weight"].shape
    for opened in (session, other):
        opened.close()


X = np.zeros((4, 8), np.float32)


def test_wrong_names_and_values_are_named_errors(client, folder, session, tmp_path) -> None:
    plain = client.open(folder("mobile"))
    batch = programs.program("mobile")[1]
    plain.write_state("param/head.bias", np.full(5, np.inf, np.float32))
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: plain.step({**batch, "x": batch["x"].astype(np.float64)}),
            "InputError: .* 'x' has dtype float64, .*: convert it",
        ),
        (lambda: plain.state_entry("param/none"), "ConfigurationError: There is no state entry 'param/none'"),
        (lambda: plain.write_state("step", X), "ConfigurationError: The state entry 'step' has another type or shape"),
        (lambda: plain.save(tmp_path / "a.safetensors", "[1]"), "ConfigurationError: extra of the checkpoint is no JSON object"),
        (lambda: plain.save(tmp_path / "a.safetensors", "{1"), "ConfigurationError: extra of the checkpoint is not JSON"),
        (
            lambda: plain.save(tmp_path / "a.safetensors", '{"a": 1, "b": {}, "a": 2}'),
            "ConfigurationError: extra of the checkpoint has a key twice in an object: give a JSON object",
        ),
        (
            lambda: session.save(tmp_path / "a.safetensors", '{"a": [' + "1," * (2**21 - 100) + "1]}"),
            "ConfigurationError: extra of the checkpoint has more bytes or values than would be read again",
        ),
        (
            lambda: plain.save(tmp_path / "a.safetensors"),
            "CheckpointError: No checkpoint was written .* holds NaN or",
        ),
        (lambda: plain.step(batch), "NonFiniteLossError: The loss at step 0 is"),
        (lambda: session.save(tmp_path / "none" / "a.safetensors"), "CheckpointError: .* could not be written: No such file"),
        (lambda: client.open(tmp_path / "none"), "CheckpointError: .* is no folder: give the folder that program.save"),
        (lambda: client.open(folder("mobile"), threads=-1), "ConfigurationError: threads is -1 .* give threads from 0"),
        (
            lambda: client.open(folder("mobile"), threads=1025),
            "ConfigurationError: threads is 1025 .* from 0, .* to 1024",
        ),
    ]
    for attempt, message in cases:
        with pytest.raises(c_library.ClientError, match=message):
            attempt()
    assert not list(tmp_path.iterdir())
    plain.close()


def test_a_wrong_checkpoint_is_a_named_error_and_changes_nothing(session, tmp_path) -> None:
    batch = programs.program("dropout")[1]
    session.save(tmp_path / "good.safetensors")
    session.step(batch)
    before = session.state()
    content = (tmp_path / "good.safetensors").read_bytes()
    restamped, engine = c_library.restamped, b'"engine":"onnxruntime"'
    cases = {
        "short and stamped": (restamped(content[:-8]), "another type, shape or size"),
        "huge": (b"\xff" * 8 + content[8:], "no whole safetensors file"),
        "journal": (restamped(content.replace(engine, b'"journal":"{}","x":"y"')), "with a journal, .* save it whole"),
    }
    for name, (changed, message) in cases.items():
        (tmp_path / f"{name}.safetensors").write_bytes(changed)
        with pytest.raises(c_library.ClientError, match=f"CheckpointError: .*({message})"):
            session.restore(tmp_path / f"{name}.safetensors")
        assert_same_state(session.state(), before)
    with pytest.raises(c_library.ClientError, match=r"CheckpointError: .*none\.safetensors' cannot be opened"):
        session.restore(tmp_path / "none.safetensors")


def test_null_in_place_of_what_is_needed_is_named(client, session) -> None:
    none, library, nothing = ctypes.c_void_p(), client.library, ctypes.c_size_t(0)
    entry, two = c_library.Tensor(name=b"step"), ctypes.c_size_t(2)
    handle, opened = session._handle, ctypes.byref(ctypes.c_void_p())
    cases: list[tuple[Callable[[], int], str]] = [
        (lambda: library.burnish_open(none, none, opened), "The folder is NULL: give the one that program.save"),
        (lambda: library.burnish_step(handle, none, two, none), "The batch is NULL: give as many arrays as its count says"),
        (lambda: library.burnish_save(handle, none, none), "The path is NULL: give that of a file"),
        (lambda: library.burnish_restore(handle, none), "The path is NULL: give that of a file"),
        (lambda: library.burnish_write_state(handle, ctypes.byref(entry)), "The entry, or its data, is NULL"),
    ]
    for call, message in cases:
        with pytest.raises(c_library.ClientError, match=f"ConfigurationError: {message}"):
            client.check(call())
    for name, arguments in {
        "step": (none, nothing, none),
        "evaluate": (none, nothing, 0, none),
        "predict": (none, nothing, 0, none),
        "features": (none, nothing, none),
        "cache_open": (nothing, opened),
        "cache_features": (none, nothing, none, nothing, none),
        "set": (b"lr", ctypes.c_double(1)),
        "state": (b"step", ctypes.byref(entry)),
        "state_at": (nothing, ctypes.byref(entry)),
        "save": (b"a", none),
        "restore": (b"a",),
        "export": (b"a", 0),
    }.items():
        with pytest.raises(c_library.ClientError, match=r"ConfigurationError: The (session|cache) is NULL: .* status says why"):
            client.check(getattr(library, f"burnish_{name}")(none, *arguments))


def npy_arguments(tmp_path: Path, name: str, samples: int = 3) -> list[str]:
    """``--data`` for some batches of a program's data."""
    arguments = ["--batch", str(len(programs.program(name)[1]["labels"]))]
    for key, array in programs.program(name)[1].items():
        path = tmp_path / f"{key}.npy"
        rolled = [np.roll(array, shift, axis=0) for shift in range(samples)]
        np.save(path, np.concatenate(rolled))
        arguments += ["--data", f"{key}={path}"]
    return arguments


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Path:
    return c_library.build(tmp_path_factory.mktemp("main"), "train", c_library.SOURCES / "main.c")


def test_the_example_trains_as_python_does(trainer, folder, tmp_path) -> None:
    data = npy_arguments(tmp_path, "mobile")
    command = [
        str(trainer),
        str(folder("mobile")),
        *data,
        "--steps",
        "5",
        "--threads",
        "1",
        "--export",
        str(tmp_path / "tuned.onnx"),
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    theirs = python_session("mobile")
    batch = programs.program("mobile")[1]
    expected = [theirs.step({key: np.roll(array, step % 3, axis=0) for key, array in batch.items()})["loss"] for step in range(5)]
    assert [np.float32(line.split()[-1]) for line in lines] == [np.float32(loss) for loss in expected]
    burnish.load(tmp_path / "tuned.onnx")


def test_the_example_says_before_it_trains_that_it_cannot_export(trainer, adapters, tmp_path) -> None:
    command = [trainer, adapters, "--batch", "4", "--export", tmp_path / "tuned.onnx"]
    for name, array in vectors.batch_of({"program": "adapters"}).items():
        np.save(tmp_path / f"{name}.npy", array)
        command += ["--data", f"{name}={tmp_path / name}.npy"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert "train: The model has adapters, which an export merges into their weights, and this client does not" in run.stderr
    assert not (tmp_path / "tuned.onnx").exists()


def kill_and_resume(trainer: Path, program: Path, data: list[str], kills: int, tmp_path: Path) -> None:
    """Kill a run at random moments; what it ends in is what one that was left alone ends in."""
    checkpoint, alone = tmp_path / "killed.safetensors", tmp_path / "alone.safetensors"
    steps = str(20 + 12 * kills)
    command = [str(trainer), str(program), *data, "--steps", steps, "--every", "1", "--threads", "1", "--checkpoint"]
    began = time.monotonic()
    subprocess.run([*command, str(alone)], check=True, stdout=subprocess.DEVNULL)
    lasted = time.monotonic() - began
    generator, killed = random.Random(4), 0
    while killed < kills:
        run = subprocess.Popen([*command, str(checkpoint)], stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(generator.random() * lasted / kills)
        run.send_signal(signal.SIGKILL)
        run.stdout.close()
        if run.wait() == -signal.SIGKILL:
            killed += 1
        else:  # it came to its end before
            assert checkpoint.read_bytes() == alone.read_bytes()
            checkpoint.unlink()
    subprocess.run([*command, str(checkpoint)], check=True, stdout=subprocess.DEVNULL)
    assert checkpoint.read_bytes() == alone.read_bytes()
    assert not list(tmp_path.glob(".*.partial"))


def test_a_killed_run_goes_on_bit_for_bit(trainer, folder, tmp_path) -> None:
    kill_and_resume(trainer, folder("mobile"), npy_arguments(tmp_path, "mobile"), 5, tmp_path)


@pytest.mark.campaign
def test_a_run_killed_at_fifty_moments_goes_on_bit_for_bit(trainer, folder, tmp_path) -> None:
    kill_and_resume(trainer, folder("mobile"), npy_arguments(tmp_path, "mobile"), 50, tmp_path)


@pytest.mark.slow
def test_the_cpp_wrapper_trains_and_throws(folder, tmp_path) -> None:
    if shutil.which(c_library.CXX) is None:
        pytest.skip(f"there is no {c_library.CXX}: install one (on Debian the package g++)")
    wrapped = c_library.build(tmp_path, "wrapped", Path(__file__).with_name("wrapped.cpp"))
    run = subprocess.run([str(wrapped), str(folder("residual")), str(tmp_path)], capture_output=True, text=True, check=True)
    theirs = python_session("residual")
    batch = {"x": np.full((6, 1, 8, 8), 0.5, np.float32), "labels": np.arange(6)}
    expected = [theirs.step(batch)["loss"] for _ in range(3)]
    lines = run.stdout.splitlines()
    assert [np.float32(line) for line in lines[:3]] == [np.float32(loss) for loss in expected]
    assert lines[3].startswith("InputError: The batch lacks the input 'labels'")
    theirs.restore(tmp_path / "cpp.safetensors")
    with pytest.raises(CheckpointError):
        theirs.restore(tmp_path / "none.safetensors")


@pytest.mark.slow
def test_the_program_in_the_documentation_runs(folder, tmp_path) -> None:
    page = (c_library.SOURCES.parents[1] / "docs" / "c-client.md").read_text(encoding="utf-8")
    (tmp_path / "first.c").write_text(page.partition("```c\n")[2].partition("```")[0], encoding="utf-8")
    (tmp_path / "program").symlink_to(folder("residual"))
    first = c_library.build(tmp_path, "first", tmp_path / "first.c")
    printed = subprocess.run([str(first)], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    batch = {"x": np.zeros((16, 1, 8, 8), np.float32), "labels": np.zeros(16, np.int64)}
    assert printed == f"loss {python_session('residual').step(batch)['loss']:g}\n"
