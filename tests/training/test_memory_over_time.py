"""Memory of processes that step, open, compile and restore for a long time: it grows no more after the first tenth."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import burnish
from burnish.training import Session

MODEL = """<ir_version: 10, opset_import: ["": 18]>
g (float[b,4] x) => (float[b,2] y) <float[4,3] w = {1,0,0,0,1,0,0,0,1,1,1,1}, float[3] s = {1,1,1}, float[3] z = {0,0,0},
float[3,2] v = {1,0,0,1,1,1}> {
  h = MatMul (x, w)
  n = BatchNormalization (h, s, z, z, s)
  r = Relu (n)
  y = MatMul (r, v)
}"""
SHARE, LEAST = 0.05, 8 << 20
"""What memory may grow by: a share of it, or bytes."""


def anonymous_memory() -> int:
    """Bytes of memory that this process has and no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))


def grows(turn: Callable[[int], object], turns: int) -> tuple[int, int]:
    """Return the memory after a tenth of the turns, and the most that it was later, at ten places."""
    held = []
    for number in range(turns):
        turn(number)
        if (number + 1) % (turns // 10) == 0:
            gc.collect()
            held.append(anonymous_memory())
    return held[0], max(held[1:])


def check(turn: Callable[[int], object], turns: int) -> None:
    first, most = grows(turn, turns)
    print(f"{turns} turns: {first / 2**20:.1f} MiB after a tenth, {most / 2**20:.1f} at most later")
    assert most - first < max(SHARE * first, LEAST)


def compiled() -> burnish.Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return burnish.compile(onnx.parser.parse_model(MODEL), optimizer="adamw:lr=0.001")


def batch(number: int) -> dict[str, np.ndarray]:
    """Of 2 to 8 samples."""
    size = number % 7 + 2
    return {"x": np.ones((size, 4), np.float32), "labels": np.arange(size) % 2}


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_memory_of_100000_steps(engine: str) -> None:
    pytest.importorskip(engine if engine != "reference" else "numpy")
    session = Session(compiled(), engine=engine)
    check(lambda number: session.step(batch(number)), 100_000)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_memory_of_500_sessions(engine: str) -> None:
    pytest.importorskip(engine if engine != "reference" else "numpy")
    program = compiled()
    check(lambda number: Session(program, engine=engine).step(batch(number)), 500)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_memory_of_500_compilations() -> None:
    check(lambda number: compiled(), 500)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ["onnxruntime", "torch", "reference"])
def test_memory_of_100_restores(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine if engine != "reference" else "numpy")
    session = Session(compiled(), engine=engine)
    session.step(batch(0))
    session.save_checkpoint(tmp_path / "state.safetensors")

    def restored(number: int) -> None:
        session.restore(tmp_path / "state.safetensors")
        session.step(batch(number))

    check(restored, 100)


def test_memory_that_grows_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrays are in no cycle, and to look for cycles among all that the tests before left takes seconds each time.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    kept: list[np.ndarray] = []
    with pytest.raises(AssertionError):
        check(lambda number: kept.append(np.ones(1 << 20)), 20)
    check(lambda number: np.ones(1 << 20), 20)
    assert "20 turns" in capsys.readouterr().out
