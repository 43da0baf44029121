"""The program and the engine that burnish's contenders train by, as their job says."""

from __future__ import annotations

from typing import Any

import burnish
from burnish.engines import Engine
from burnish.engines.onnxruntime import OnnxRuntimeEngine


def engine_of(job: dict[str, Any]) -> Engine:
    """The engine that the job names; on ONNX Runtime without burnish's kernels, unless the job asks for them."""
    name = job.get("engine", "torch")
    if name == "onnxruntime":
        return OnnxRuntimeEngine(kernels=job.get("kernels", False))
    return burnish.engines.get(name)


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
