"""Writes down one worker's computation and what it would exchange with others. Started by ``data_parallel.py``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import burnish
from contenders import Step, serve
from data_parallel_simulation import RecordingCommunicator
from job import read_batches, read_job

STEPS = 9
WARMUP = 2


def main() -> None:
    job = read_job()
    x, labels = read_batches(job)[0]
    settings = dict(job["optimizer"])
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)

    def build() -> tuple[Step, dict[str, Any]]:
        communicators = {"shared": RecordingCommunicator(), "apart": RecordingCommunicator()}
        sessions = {
            name: burnish.Session(
                program,
                engine="torch",
                threads=job["threads"],
                parallel=burnish.DataParallel(share=name == "shared", communicator=communicator),
            )
            for name, communicator in communicators.items()
        }
        for _ in range(STEPS):
            for name, communicator in communicators.items():
                communicator.start_step()
                sessions[name].step({"x": x, "labels": labels})
                communicator.end_step()
        recorded = {name: asdict(communicator.recording(skip=WARMUP)) for name, communicator in communicators.items()}
        return lambda: 0.0, {"recordings": recorded}

    program = burnish.compile(job["onnx"], loss="cross_entropy", optimizer=optimizer, metrics=())
    serve(build)


if __name__ == "__main__":
    main()
