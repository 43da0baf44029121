"""Measure the memory of a step on ONNX Runtime in a separate process, on Linux."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from burnish.engines.base import HandedOver
from burnish.engines.onnxruntime.engine import OnnxRuntimeEngine
from burnish.engines.onnxruntime.runner import OnnxRuntimeRunner
from burnish.errors import EngineError, NonFiniteLossError
from burnish.program import Program, Role
from burnish.program.signature import Entry

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEPS = 3


def measure(program: Program, batch: int) -> int | None:
    """Return the peak memory of steps in bytes; see ``Program.measured_peak``."""
    if not (STATUS.is_file() and CLEAR.exists()):
        return None
    with tempfile.TemporaryDirectory(prefix="burnish-") as folder:
        program.save(Path(folder, "program"))
        command = [sys.executable, "-m", __name__, str(Path(folder, "program")), str(batch)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"])[-1]
        raise EngineError(f"memory: a step at batch {batch} could not be run to measure it: {last}. Train it to see why")
    return int(json.loads(run.stdout.splitlines()[-1]))


def _resident(peak: bool) -> int:
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s*(\d+) kB", STATUS.read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) * 1024


def _drawn(entry: Entry, batch: int, generator: np.random.Generator) -> np.ndarray:
    shape = [extent if isinstance(extent, int) else batch if axis == 0 else 1 for axis, extent in enumerate(entry.extents)]
    dtype = entry.numpy_dtype
    if dtype.kind in "iu":
        low = entry.minimum or 0
        return generator.integers(low, low + 1 if entry.maximum is None else entry.maximum + 1, shape).astype(dtype)
    return generator.random(shape).astype(dtype)


def main() -> None:
    """Run steps of a saved program, and print the increase of the peak memory."""

    program, batch = Program.load(sys.argv[1]), int(sys.argv[2])
    engine, generator = OnnxRuntimeEngine(), np.random.default_rng(0)
    signature = program.signature["step"]
    inputs = {entry.name: _drawn(entry, batch, generator) for entry in signature.inputs_of(Role.DATA, Role.LABEL)}
    inputs |= {
        entry.name: np.asarray(0.0 if entry.default is None else entry.default, entry.numpy_dtype)
        for entry in signature.inputs_of(Role.HYPERPARAMETER)
    }
    state = program.initial_state(0)
    held = sum(array.nbytes for array in state.values())
    program.release_weights()
    runner = engine.open(program.graphs.lowered_to(engine.target), HandedOver(state), device=None, threads=None)
    del state
    assert isinstance(runner, OnnxRuntimeRunner)  # there are no other workers
    runner.load_step()
    # The difference leaves out the runtime and the loaded graph, but includes the present state.
    before = _resident(peak=False) - held
    CLEAR.write_text("5", encoding="ascii")
    for _ in range(STEPS):
        try:
            runner.step(inputs)
        except NonFiniteLossError:  # random values: the step has run nevertheless
            break
    print(json.dumps(max(0, _resident(peak=True) - before)))


if __name__ == "__main__":
    main()
