"""What the C client does in bad company: names beyond ASCII, folders in place of files, other processes and threads."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
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


@pytest.mark.parametrize("value", ["a\ud800", "a\0b"])
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


def flips(content: bytes, count: int | None) -> list[int]:
    """Bits of a file: some that are drawn, or all."""
    bits = range(8 * len(content))
    return list(bits) if count is None else random.Random(7).sample(bits, count)


COUNTS = (200, pytest.param(None, marks=pytest.mark.campaign))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["state", "adapters"])
def test_no_bit_of_a_checkpoint_changes_unseen(client, folder, adapted, tmp_path, kind: str, count: int | None) -> None:
    opened = client.open(folder("dropout") if kind == "state" else adapted(1))
    opened.save(tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    before = opened.state()
    path = tmp_path / "flipped.safetensors"
    for bit in flips(content, count):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(c_library.ClientError, match="CheckpointError"):
            opened.restore(path)
    assert_same_state(opened.state(), before)
    opened.close()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["program.json", "state.safetensors", "init.onnx", "predict.onnx"])
def test_no_bit_of_a_program_changes_unseen(client, folder, tmp_path, name: str, count: int | None) -> None:
    root = shutil.copytree(folder("dropout"), tmp_path / "program")
    content = (root / name).read_bytes()
    batch = {"x": programs.program("dropout")[1]["x"]}
    opened = client.open(root) if name == "predict.onnx" else None
    for bit in flips(content, count if count is None or opened is None else 20):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (root / name).write_bytes(changed)
        with pytest.raises(c_library.ClientError, match="CheckpointError"):
            client.open(root) if opened is None else opened.predict(batch)
    if opened is not None:
        opened.close()
