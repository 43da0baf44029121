"""Writes down one worker's computation and what it would exchange with others. Started by ``data_parallel.py``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import burnish
from contenders import Step, serve
from data_parallel_simulation import RecordingCommunicator
from job import read_batches, read_job

STEPS = 6


def main() -> None:
    job = read_job()
    x, labels = read_batches(job)[0]
    settings = dict(job["optimizer"])
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)

    def recorded(share: bool) -> dict[str, Any]:
        communicator = RecordingCommunicator()
        parallel = burnish.DataParallel(share=share, communicator=communicator)
        with burnish.Session(program, engine="torch", threads=job["threads"], parallel=parallel) as session:
            for _ in range(STEPS):
                communicator.start_step()
                session.step({"x": x, "labels": labels})
                communicator.end_step()
        return asdict(communicator.recording(skip=2))

    def build() -> tuple[Step, dict[str, Any]]:
        return lambda: 0.0, {"recordings": {"shared": recorded(True), "apart": recorded(False)}}

    program = burnish.compile(job["onnx"], loss="cross_entropy", optimizer=optimizer, metrics=())
    serve(build)


if __name__ == "__main__":
    main()
