"""Contender: one worker of burnish's data-parallel training, or one that trains alone. Started by ``data_parallel.py``."""

from __future__ import annotations

import importlib
from typing import Any

import burnish
from burnish.distributed.connection.joining import join
from burnish_step import engine_of, program_of
from contenders import Step, serve
from job import endless, part_of_worker, read_feeds, read_job


def main() -> None:
    job = read_job()
    importlib.import_module(job.get("engine", "torch"))
    group = join(first_contact=600)
    rank, workers = job.get("part", (group.rank, group.world_size))
    batches = endless(part_of_worker(read_feeds(job), rank, workers))

    def build() -> tuple[Step, dict[str, Any]]:
        engine = engine_of(job)
        parallel = burnish.DataParallel(group=group, **job["parallel"]) if group.world_size > 1 else None
        session = burnish.Session(program_of(job), engine=engine, threads=job["threads"], parallel=parallel)
        return lambda: session.step(next(batches))["loss"], {"session": session.describe()}

    serve(build)


if __name__ == "__main__":
    main()
