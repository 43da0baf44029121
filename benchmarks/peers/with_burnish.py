"""Contender: burnish, on the engine that the job names. Started by ``compare.py``."""

from __future__ import annotations

import importlib
from typing import Any

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from contenders import Step, serve
from job import endless, read_feeds, read_job


def main() -> None:
    job = read_job()
    importlib.import_module({"onnxruntime": "onnxruntime", "torch": "torch"}[job["engine"]])
    batches = endless(read_feeds(job))
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in job["optimizer"].items()}
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)

    def build() -> tuple[Step, dict[str, Any]]:
        # Before the program, so that its kernels are built meanwhile.
        engine = OnnxRuntimeEngine(kernels=True) if job.get("kernels") else burnish.engines.get(job["engine"])
        program = burnish.compile(
            job["onnx"],
            **({"output": "loss"} if job["loss"] is None else {"loss": job["loss"]}),
            optimizer=optimizer,
            trainable=job["trainable"],
            metrics=(),
            precision=job["precision"],
        )
        session = burnish.Session(program, engine=engine, threads=job["threads"])
        versions = {"burnish": burnish.__version__, job["engine"]: importlib.import_module(job["engine"]).__version__}
        return lambda: session.step(next(batches))["loss"], {"versions": versions}

    serve(build)


if __name__ == "__main__":
    main()
