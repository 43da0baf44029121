"""Tries the burnish that is installed for this Python: the demo, a step on each engine, fine-tuning, and whether kernels run.

``python trial.py KERNELS ENGINE...``: KERNELS is ``installed`` if the installation has to bring kernels, ``none`` if there must
be none. It writes in a folder that it removes. Its last line is JSON. It ends with an error at the first failure.
"""

from __future__ import annotations

import contextlib
import json
import platform
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.models import residual_network
from burnish.training.environment import diagnose
from burnish.training.profiling import profile

BATCH = {"x": np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": np.arange(4)}


def main(kernels: str, *engines: str) -> None:
    """Try everything.

    Raises:
        RuntimeError: something fails, or the kernels are not as ``kernels`` says.
    """
    command("demo", "--epochs", "2", "--output", "demo")
    program = burnish.compile(residual_network(width=4, blocks=(1, 1)), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    losses = {name: loss_after_a_step(program, name) for name in engines}
    np.testing.assert_allclose([*losses.values()], losses["reference"], rtol=1e-4)
    ran_on = {name: burnish.Session(program, engine=name).describe() for name in engines}
    called = own_operators(program)
    if kernels == "installed":
        folder = Path(burnish.__file__).parent
        for name in set(engines) - {"reference"}:
            library = ran_on[name]["kernels"]
            expect(library and Path(library).is_relative_to(folder), f"the kernels of {name} are {library}, not in {folder}")
        expect(called, "a step calls no operator of burnish's")
    else:
        for name, found in ran_on.items():
            expect(found["kernels"] is None and found["kernels_reason"], f"{name} has kernels, or no reason for none: {found}")
        expect(not called, f"without kernels a step calls {called}")
    ir.save(residual_network(width=4, blocks=(1, 1), classes=10), "model.onnx")
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 60)
    images = random.normal(labels[:, None, None, None], 0.1, (60, 1, 8, 8)).astype(np.float32)
    np.savez("data.npz", x=images, y=labels)
    command("finetune", "model.onnx", "--data", "data.npz", "--epochs", "2", "--batch-size", "8", "--output", "tuned")
    expect(Path("tuned", "tuned.onnx").is_file(), "burnish finetune wrote no tuned/tuned.onnx")
    libc = " ".join(platform.libc_ver())
    print(json.dumps({"libc": libc, "losses": losses, "operators": called, "ran_on": ran_on, "doctor": diagnose()}))


def command(*arguments: str) -> None:
    """Run ``python -m burnish``, in this process: an emulator of another processor starts no further ones."""
    sys.argv = ["burnish", *arguments]
    try:
        runpy.run_module("burnish", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        expect(not ended.code, f"burnish {' '.join(arguments)} ended with {ended.code}")


def loss_after_a_step(program: burnish.Program, engine: str) -> float:
    session = burnish.Session(program, engine=engine)
    session.step(BATCH)
    return float(session.step(BATCH)["loss"])


def own_operators(program: burnish.Program) -> list[str]:
    """The operators of burnish's own that a step calls, as ONNX Runtime's profiler saw them."""
    seen, without = (
        {run.operator for run in profile(program, BATCH, engine, steps=1).recording.runs}
        for engine in ("onnxruntime", OnnxRuntimeEngine(kernels=False))
    )
    return sorted(name for name in seen - without if not onnx.defs.has(name))


def expect(holds: object, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main(*sys.argv[1:])
