"""Contender: one worker of burnish's data-parallel training, or one that trains alone. Started by ``data_parallel.py``."""

from __future__ import annotations

from typing import Any

import burnish
from burnish.distributed.connection.joining import join
from contenders import Step, serve
from job import endless, part_of_worker, read_batches, read_job


def main() -> None:
    job = read_job()
    group = join(first_contact=600)
    rank, workers = job.get("part", (group.rank, group.world_size))
    batches = endless([{"x": x, "labels": labels} for x, labels in part_of_worker(read_batches(job), rank, workers)])
    settings = dict(job["optimizer"])
    optimizer = getattr(burnish.optim, settings.pop("name"))(**settings)

    def build() -> tuple[Step, dict[str, Any]]:
        program = burnish.compile(job["onnx"], loss="cross_entropy", optimizer=optimizer, metrics=())
        parallel = burnish.DataParallel(group=group, **job["parallel"]) if group.world_size > 1 else None
        session = burnish.Session(program, engine="torch", threads=job["threads"], parallel=parallel)
        return lambda: session.step(next(batches))["loss"], {}

    serve(build)


if __name__ == "__main__":
    main()
