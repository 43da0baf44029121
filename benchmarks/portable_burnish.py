"""Contender: burnish on stock onnxruntime. Started by ``portable.py``."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import burnish
from contenders import serve


def main() -> None:
    job = json.loads(sys.argv[1])
    started = time.perf_counter()
    program = burnish.compile(
        job["model"], loss="cross_entropy", optimizer=burnish.optim.sgd(lr=job["lr"], momentum=job["momentum"]), metrics=()
    )
    compiled = time.perf_counter()
    session = burnish.Session(program, threads=job["threads"])
    loaded = time.perf_counter()
    with np.load(job["data"]) as data:
        batch = {"x": data["x"], "labels": data["labels"]}
    serve(
        lambda: session.step(batch)["loss"],
        {"compile_seconds": compiled - started, "load_seconds": loaded - compiled, "nodes": len(program.step.graph)},
    )


if __name__ == "__main__":
    main()
