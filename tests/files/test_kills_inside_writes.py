"""A process that is killed at any moment of a write leaves what was there before, or what it was to write; never neither."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.files import folder
from burnish.files.file_writing import write_text
from burnish.files.identity import graph_hashes, program_hash
from burnish.models import dlrm
from burnish.training import read_checkpoint

EVENTS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "ctypes.call_function"})
"""Of Python's audit, raised before each change of the disk; what is written to an open file in between is in no place yet."""


def is_killed(write: Callable[[], object], event: int) -> bool:
    """Write in a process that dies before this change of the disk, counted from 1; return whether it came to that."""
    child = os.fork()
    if not child:
        flush, count = os.fsync, 0

        def end(name: str, arguments: tuple) -> None:
            nonlocal count
            if name in EVENTS:
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        def flushed(descriptor: int) -> None:
            end("open", ())
            flush(descriptor)

        os.fsync = flushed
        sys.addaudithook(end)
        try:
            write()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def identity(path: Path) -> str:
    program = burnish.Program.load(path)
    return program_hash(graph_hashes(program), program.signature)


def arrays(path: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in read_checkpoint(path).state.items()}


def compiled(optimizer: str) -> burnish.Program:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[b,2] x) => (float[b,2] y) <float[2,2] w = {1,2,3,4}> { y = MatMul(x, w) }""")
    return burnish.compile(model, loss="mse", optimizer=optimizer)


WRITES = [
    *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("program", "program in two steps")),
    *("program.onnx", "checkpoint", "journal", "export", "text"),
]


def writes(kind: str, path: Path) -> tuple[list[Callable[[], object]], Callable[[], object]]:
    """What writes the earlier content, what writes the new one, and what reads whichever is there."""
    if kind.startswith("program"):
        earlier, new = compiled("sgd"), compiled("adam")
        return [lambda: earlier.save(path), lambda: new.save(path)], lambda: identity(path)
    if kind == "text":
        return [lambda: write_text(path, "earlier"), lambda: write_text(path, "new")], path.read_text
    if kind == "journal":
        rows = [400, 3000]
        model = dlrm(rows, numbers=2, width=4, bottom=(3,), top=(3,))
        optimizer = burnish.optim.adagrad(lr=0.1)
        program = burnish.compile(model, loss="bce_with_logits", optimizer=optimizer, metrics=[], sparse="auto")
        batch = synthetic_clicks(16, rows, numbers=2).batch(np.arange(8))
    else:
        program = compiled("adam")
        batch = {"x": np.ones((2, 2), np.float32), "targets": np.zeros((2, 2), np.float32)}

    def write(steps: int) -> None:
        # One of the process that it runs in: a forked one has no use for its parent's.
        session = burnish.Session(program, engine="reference")
        if path.exists() and kind == "journal":
            session.restore(path)
        for _ in range(steps):
            session.step(batch)
        if kind == "export":
            session.export(path)
        else:
            session.save_checkpoint(path, journal=kind == "journal")

    return [lambda: write(0), lambda: write(1)], path.read_bytes if kind == "export" else lambda: arrays(path)


@pytest.mark.parametrize("kind", WRITES)
def test_a_kill_inside_a_write(kind, tmp_path, monkeypatch):
    if kind == "program in two steps":
        monkeypatch.setattr(folder, "exchange", lambda *_: False)
    path = tmp_path / "place" / ("last.safetensors" if kind == "journal" else kind)
    path.parent.mkdir()
    (first, second), read = writes(kind, path)
    first()
    earlier = read()
    shutil.copytree(path.parent, tmp_path / "earlier")
    found: list[object] = []
    while is_killed(second, len(found) + 1):
        found.append(read())
        shutil.rmtree(path.parent)
        shutil.copytree(tmp_path / "earlier", path.parent)
    new = read()
    assert new != earlier
    assert [content for content in found if content not in (earlier, new)] == []
    assert found[0] == earlier
    assert len(found) >= 5
    assert [name for name in os.listdir(path.parent) if name.endswith((".partial", ".earlier"))] == []
