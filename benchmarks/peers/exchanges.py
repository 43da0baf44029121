"""Measures all-reduces of the kinds that training makes, between workers that do nothing else. By ``data_parallel.py``."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from burnish.distributed.connection.joining import join
from burnish.distributed.connection.shared_memory import SMALL_BYTES
from contenders import Step, serve
from job import read_job

WARMUP, REPEATS = 5, 15


def main() -> None:
    job = read_job()
    torch.set_num_threads(1)
    group = join()

    def seconds(size: int) -> float:
        """Of one exchange behind another: a barrier lets workers go at times that differ by more than an exchange lasts."""
        buffer = torch.zeros(size // 4)
        shared = group.shared_buffer(torch.float32, size // 4) if size > SMALL_BYTES else None
        if shared is not None:
            shared.tensor.zero_()
        taken = []
        for _ in range(WARMUP + REPEATS):
            started = time.perf_counter()
            if shared is None:
                group.all_reduce(buffer)
            else:
                shared.all_reduce().wait()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[WARMUP:])

    def build() -> tuple[Step, dict[str, Any]]:
        return lambda: 0.0, {"exchange_seconds": [seconds(size) for size in job["sizes"]]}

    serve(build)


if __name__ == "__main__":
    main()
