"""Trains a small network with kernels on the processor that runs this, and writes its losses and its state: ``train.py FILE``."""

from __future__ import annotations

import sys

import numpy as np

import burnish
import emulation.libraries  # noqa: F401
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.kernels import building
from emulation.processors import OPERATORS


def main(file: str) -> None:
    """Three steps of a residual network with batch normalization."""
    optimizer = optim.adam(lr=0.01, weight_decay=0.01)
    program = burnish.compile(burnish.models.residual_network(), loss="cross_entropy", optimizer=optimizer)
    session = burnish.Session(program, engine=OnnxRuntimeEngine(kernels=True), threads=2)
    random = np.random.default_rng(0)
    losses = [
        session.step({"x": random.normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": random.integers(0, 10, 4)})["loss"]
        for _ in range(3)
    ]
    np.savez(file, losses=np.array(losses), **{name.replace("/", " "): array for name, array in session.state().items()})
    print(getattr(building.find_installed(OPERATORS), "name", "none"))


if __name__ == "__main__":
    main(sys.argv[1])
