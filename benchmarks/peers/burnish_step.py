"""The program and the engine that burnish's contenders train by, as their job says."""

from __future__ import annotations

from typing import Any

import burnish
from burnish.engines import Engine
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.errors import EngineError


def engine_of(job: dict[str, Any]) -> Engine:
    """The engine that the job names: as someone gets it who asks for nothing else, or as its ``kernels`` says.

    ``kernels`` is False for ONNX Runtime's standard operators alone, True for those kernels that the installation has.

    Raises:
        EngineError: the job wants kernels, and the installation has none. They are not built here: no one's first step would be.
    """
    name = job.get("engine", "torch")
    if name != "onnxruntime":
        return burnish.engines.get(name)
    engine = OnnxRuntimeEngine(kernels=None if job.get("kernels") else job.get("kernels"))
    if job.get("kernels") and engine.kernels is None:
        reason = engine.describe()["kernels_reason"]
        raise EngineError(f"there are no kernels for ONNX Runtime: {reason}. `burnish doctor` says how to come by them")
    return engine


def program_of(job: dict[str, Any]) -> burnish.Program:
    """The program of the job's model, loss, optimizer and precision."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in job["optimizer"].items()}
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)
    return burnish.compile(
        job["onnx"],
        **({"output": "loss"} if job["loss"] is None else {"loss": job["loss"]}),
        optimizer=optimizer,
        trainable=job["trainable"],
        metrics=(),
        precision=job.get("precision", "float32"),
        sparse="auto" if job.get("sparse") else None,
    )
