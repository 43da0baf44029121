"""What the C client does in bad company: names beyond ASCII, folders in place of files, other processes and threads."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_library
import numpy as np
import onnx
import onnx_ir as ir
import programs
import pytest

import burnish
from oracles.same_state import assert_same_state
from oracles.small_networks import batch_of, perceptron
from oracles.standard_operators import STANDARD

reason = c_library.missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

NAMES = {"first.weight": "poids_é", "first.bias": "重み", "head.weight": "b😀", "head.bias": "a\u07ff\u0800\uffff\U00010000"}
METADATA = {"classes": "chêne, hêtre, 松, 😀", 'ключ"\\': "\u0001\t\x7f\u2028"}


@pytest.fixture(scope="module")
def renamed(tmp_path_factory) -> Path:
    """A program whose weights have names of two, three and four bytes a character, and whose model has metadata."""
    model = perceptron()
    for before, after in NAMES.items():
        model.graph.initializers[before].name = after
    model.metadata_props.update({"classes": "old", "kept": "ü"})
    path = tmp_path_factory.mktemp("renamed") / "program"
    burnish.compile(model, optimizer="adamw").save(path)
    return path


def test_names_and_metadata_beyond_ascii_are_pythons(client, renamed, tmp_path) -> None:
    theirs, ours = burnish.Session(burnish.Program.load(renamed), engine=STANDARD, threads=1), client.open(renamed)
    batch = batch_of(perceptron())
    theirs.metadata.update(METADATA)
    theirs.step(batch)
    theirs.save_checkpoint(tmp_path / "python.safetensors", extra={"place": "é"})
    ours.restore(tmp_path / "python.safetensors")
    assert {f"param/{name}" for name in NAMES.values()} <= set(ours.state())
    ours.save(tmp_path / "c.safetensors", '{"place": "\\u00e9"}')
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    theirs.step(batch)
    ours.step(batch)
    assert_same_state(ours.state(), theirs.state())
    theirs.export(tmp_path / "python.onnx", fold_norm=False)
    ours.export(tmp_path / "c.onnx")
    models = [onnx.load(tmp_path / file) for file in ("python.onnx", "c.onnx")]
    weights, metadata = (
        [{item.name for item in model.graph.initializer} for model in models],
        [[(item.key, item.value) for item in model.metadata_props] for model in models],
    )
    assert set(NAMES.values()) <= weights[1] == weights[0]
    assert sorted(metadata[1]) == sorted(item for item in metadata[0] if item[0] != "burnish.objective")
    ours.close()


@pytest.mark.parametrize("value", ["a\udcff", "a\0b"])
def test_metadata_that_c_cannot_hold_are_refused(client, renamed, tmp_path, value: str) -> None:
    theirs, ours = burnish.Session(burnish.Program.load(renamed), engine=STANDARD, threads=1), client.open(renamed)
    theirs.metadata["classes"] = value
    theirs.save_checkpoint(tmp_path / "a.safetensors")
    before = ours.state()
    message = r"CheckpointError: .*a\.safetensors' is damaged: 'metadata' holds (half of a surrogate pair|the character U\+0000)"
    with pytest.raises(c_library.ClientError, match=message):
        ours.restore(tmp_path / "a.safetensors")
    assert_same_state(ours.state(), before)
    ours.close()


def test_what_is_no_file_is_refused_and_nothing_is_waited_for(session, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("link")
    before = session.state()
    cases: list[tuple[Path, str]] = [
        (tmp_path / "folder", "CheckpointError: .*folder' is not a file: give the path of one"),
        (tmp_path / "pipe", "CheckpointError: .*pipe' is not a file: give the path of one"),
        (Path("/dev/zero"), "CheckpointError: .*zero' is not a file: give the path of one"),
        (tmp_path / "link", "CheckpointError: .*link' cannot be opened: .*symbolic links"),
        (tmp_path / ("é" * 2500), "CheckpointError: '.*é \\.\\.\\. .*é' cannot be opened: File name too long. Check the path"),
        (tmp_path / "a\udcff", "CheckpointError: '.*a\\?' cannot be opened: No such file"),
    ]
    for path, message in cases:
        with pytest.raises(c_library.ClientError, match=message):
            session.restore(path)
    assert_same_state(session.state(), before)


def test_a_partial_file_of_a_living_process_stays(session, tmp_path) -> None:
    alive, dead = (tmp_path / f".a.safetensors.{number}.partial" for number in ("0123abcd", "89ef4567"))
    dead.touch()
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        session.save(tmp_path / "a.safetensors")
        assert alive.exists()
        assert not dead.exists()
    session.save(tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_figure_is_new_for_one_step(client, tmp_path) -> None:
    schedule = burnish.optim.schedules.plateau(0.1, patience=0)
    program = burnish.compile(perceptron(), optimizer=burnish.optim.sgd(lr=schedule))
    program.save(tmp_path / "program")
    theirs, ours = burnish.Session(program, engine=STANDARD, threads=1), client.open(tmp_path / "program")
    batch = batch_of(perceptron())
    for step in range(4):
        figures = {"monitored": 1.0} if step in (1, 3) else {}
        for name, value in figures.items():
            ours.set(name, value)
        if step == 1:  # a batch that is refused does not use the figure up
            with pytest.raises(c_library.ClientError, match="InputError: The batch lacks the input 'labels'"):
                ours.step({"x": batch["x"]})
        assert ours.step(batch)["lr"] == theirs.step(batch, **figures)["lr"]
    assert_same_state(ours.state(), theirs.state())
    ours.close()


def test_sessions_in_several_threads_do_not_meet(client, folder, tmp_path) -> None:
    batch = programs.program("dropout")[1]
    path = folder("dropout")

    def train(number: int) -> bytes:
        opened = client.open(path)
        for _ in range(3):
            opened.step(batch)
            opened.save(tmp_path / "shared.safetensors")
            opened.save(tmp_path / f"{number}.safetensors")
        opened.restore(tmp_path / "shared.safetensors")
        opened.close()
        return (tmp_path / f"{number}.safetensors").read_bytes()

    with ThreadPoolExecutor(4) as threads:
        contents = set(threads.map(train, range(4)))
    assert len(contents) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"shared.safetensors", *(f"{number}.safetensors" for number in range(4))}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Callable[[int], Path]:
    """Programs of adapters, on weights that the number chooses."""
    root = tmp_path_factory.mktemp("adapted")

    def saved(number: int) -> Path:
        if not (root / str(number)).exists():
            model = perceptron()
            head = model.graph.initializers["head.bias"]
            head.const_value = ir.tensor(np.full(head.shape, number, np.float32), name="head.bias")
            burnish.compile(burnish.surgery.lora(model, rank=2, alpha=4), optimizer="adamw").save(root / str(number))
        return root / str(number)

    return saved


@pytest.fixture(scope="module")
def cached(tmp_path_factory) -> Path:
    """A program whose frozen part is computed once for each sample."""
    path = tmp_path_factory.mktemp("cached") / "program"
    burnish.compile(perceptron(), optimizer="adamw", trainable=["head*"], cached_features="auto").save(path)
    return path


def test_checkpoints_of_adapters_are_pythons_byte_for_byte(client, adapted, tmp_path) -> None:
    theirs, ours = burnish.Session(burnish.Program.load(adapted(1)), engine=STANDARD, threads=1), client.open(adapted(1))
    batch = batch_of(perceptron())
    for _ in range(2):
        assert ours.step(batch) == theirs.step(batch)
    ours.save(tmp_path / "c.safetensors")
    theirs.save_checkpoint(tmp_path / "python.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "python.safetensors").read_bytes()
    assert b'"base":"' in (tmp_path / "c.safetensors").read_bytes()
    assert b'param/first.weight"' not in (tmp_path / "c.safetensors").read_bytes()
    resumed = client.open(adapted(1), seed=3)
    resumed.restore(tmp_path / "python.safetensors")
    assert_same_state(resumed.state(), theirs.state())
    other = client.open(adapted(2))
    before = other.state()
    with pytest.raises(
        c_library.ClientError, match=r"CheckpointError: .* holds adapters of another model: .* Compile the file that"
    ):
        other.restore(tmp_path / "c.safetensors")
    assert_same_state(other.state(), before)
    other.write_state("param/head.bias", ours.state_entry("param/head.bias"))  # now it has the base
    other.restore(tmp_path / "c.safetensors")
    assert_same_state(other.state(), ours.state())
    for opened in (ours, resumed, other):
        opened.close()


@pytest.fixture(scope="module")
def flip_bits(tmp_path_factory) -> Callable[..., None]:
    """Flips bits of a file that a call reads, in one process of C: all are refused."""
    built = c_library.build(tmp_path_factory.mktemp("flip"), "flip_bits", Path(__file__).with_name("flip_bits.c"))

    def flip(program: Path, file: Path, call: str, count: int, *models: Path) -> None:
        command = [built, program, file, call, str(count), *models]
        run = subprocess.run(command, capture_output=True, text=True, cwd=program.parent)
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) == (count or 8 * file.stat().st_size)

    return flip


COUNTS = (200, pytest.param(0, marks=pytest.mark.campaign, id="all"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["state", "adapters"])
def test_no_bit_of_a_checkpoint_changes_unseen(client, folder, adapted, flip_bits, tmp_path, kind: str, count: int) -> None:
    program = folder("dropout") if kind == "state" else adapted(1)
    opened = client.open(program)
    opened.save(tmp_path / "a.safetensors")
    opened.close()
    flip_bits(program, tmp_path / "a.safetensors", "restore", count)


READ_BY = {
    "program.json": "open",
    "state.safetensors": "open",
    "init.onnx": "open",
    "step.onnx": "step",
    "evaluate.onnx": "evaluate",
    "predict.onnx": "predict",
    "features.onnx": "features",
}
"""The call that first reads a file of a program; the client reads no other file."""


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", READ_BY)
def test_no_bit_of_a_program_changes_unseen(folder, cached, flip_bits, tmp_path, name: str, count: int) -> None:
    root = shutil.copytree(cached if name == "features.onnx" else folder("dropout"), tmp_path / "program")
    flip_bits(root, root / name, READ_BY[name], count)
    if name == "predict.onnx":
        flip_bits(root, root / name, "export", count)


@pytest.mark.parametrize("count", COUNTS)
def test_no_bit_of_a_packed_graph_changes_unseen(flip_bits, tmp_path, count: int) -> None:
    burnish.compile(perceptron(), optimizer="sgd").package(tmp_path / "board", runtime="c")
    models = tmp_path / "board" / "models"
    for name, call in {"init": "open", "step": "step", "evaluate": "evaluate", "predict": "predict"}.items():
        flip_bits(tmp_path / "board" / "program", models / f"{name}.ort", call, count, models)


def test_a_program_without_the_files_that_the_client_does_not_read_works(client, folder, tmp_path) -> None:
    root = shutil.copytree(folder("dropout"), tmp_path / "program")
    unread = {path.name for path in root.iterdir()} - READ_BY.keys()
    assert {"source.onnx", "grad.onnx", "apply.onnx"} <= unread
    for name in unread:
        (root / name).unlink()
    whole, part = client.open(folder("dropout")), client.open(root)
    batch = programs.program("dropout")[1]
    for opened in (whole, part):
        opened.step(batch)
        opened.export(tmp_path / "tuned.onnx")
    assert_same_state(part.state(), whole.state())
    for call in ("evaluate", "predict"):
        assert_same_state(getattr(part, call)(batch), getattr(whole, call)(batch))
    for opened in (whole, part):
        opened.close()
