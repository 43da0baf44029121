"""Contender: burnish, on the engine that the job names. Started by ``compare.py``."""

from __future__ import annotations

import importlib
from typing import Any

import burnish
from burnish_step import engine_of, program_of
from contenders import Step, serve
from job import endless, read_feeds, read_job


def main() -> None:
    job = read_job()
    importlib.import_module({"onnxruntime": "onnxruntime", "torch": "torch"}[job["engine"]])
    batches = endless(read_feeds(job))

    def build() -> tuple[Step, dict[str, Any]]:
        # Before the program, so that its kernels are built meanwhile.
        engine = engine_of(job)
        session = burnish.Session(program_of(job), engine=engine, threads=job["threads"])
        versions = {"burnish": burnish.__version__, job["engine"]: importlib.import_module(job["engine"]).__version__}
        return lambda: session.step(next(batches))["loss"], {"versions": versions, "session": session.describe()}

    serve(build)


if __name__ == "__main__":
    main()
