"""Measures all-reduces between workers that do nothing else. Started by ``data_parallel.py``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from burnish.distributed.connection import process_group
from contenders import Step, serve
from job import read_job

REPEATS = 15


def main() -> None:
    job = read_job()
    torch.set_num_threads(1)
    group = process_group.join()

    def seconds(size: int) -> float:
        buffer = torch.zeros(size // 4)
        taken = []
        for _ in range(REPEATS):
            group.barrier()
            started = time.perf_counter()
            group.all_reduce(buffer)
            taken.append(time.perf_counter() - started)
        return statistics.median(taken)

    def build() -> tuple[Step, dict[str, Any]]:
        return lambda: 0.0, {"exchange_seconds": [seconds(size) for size in job["sizes"]]}

    serve(build)


if __name__ == "__main__":
    main()
