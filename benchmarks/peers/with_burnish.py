"""Contender: burnish, on the engine that the job names. Started by ``compare.py``."""

from __future__ import annotations

import importlib
from typing import Any

import burnish
from contenders import Step, serve
from job import endless, read_batches, read_job


def main() -> None:
    job = read_job()
    importlib.import_module({"onnxruntime": "onnxruntime", "torch": "torch"}[job["engine"]])
    batches = endless([{"x": x, "labels": labels} for x, labels in read_batches(job)])
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in job["optimizer"].items()}
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)

    def build() -> tuple[Step, dict[str, Any]]:
        engine = burnish.engines.get(job["engine"])  # before the program, so that its kernels are built meanwhile
        program = burnish.compile(job["onnx"], loss="cross_entropy", optimizer=optimizer, metrics=(), precision=job["precision"])
        session = burnish.Session(program, engine=engine, threads=job["threads"])
        versions = {"burnish": burnish.__version__, job["engine"]: importlib.import_module(job["engine"]).__version__}
        return lambda: session.step(next(batches))["loss"], {"versions": versions}

    serve(build)


if __name__ == "__main__":
    main()
