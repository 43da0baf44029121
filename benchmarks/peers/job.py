"""What the scripts of this folder are told on their command line, and the batches that they train on."""

from __future__ import annotations

import itertools
import json
import os
import string
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def read_job() -> dict[str, Any]:
    """The job of this process: what ``workloads.prepare`` returned, ``threads``, ``precision``, and settings of the contender."""
    return json.loads(sys.argv[1])


def read_batches(job: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches, (x, labels) each, in the order in which they are trained on, again and again.

    Raises:
        ValueError: they hold something else, which a contender that calls this cannot train on.
    """
    with np.load(job["data"]) as data:
        if names := sorted({key.rstrip(string.digits) for key in data.files} - {"x", "labels"}):
            raise ValueError(f"its script trains on one input and class labels alone, and batches of this model hold {names}")
        return [(data[f"x{index}"], data[f"labels{index}"]) for index in range(len(data.files) // 2)]


def read_feeds(job: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The batches with all that the model takes and its loss reads, by name, in the order that the module has them in."""
    batches: dict[str, dict[str, np.ndarray]] = {}
    with np.load(job["data"]) as data:
        for key in data.files:
            name = key.rstrip(string.digits)
            batches.setdefault(key.removeprefix(name), {})[name] = data[key]
    return list(batches.values())


def part_of_worker(batches: list[dict[str, np.ndarray]], rank: int, workers: int) -> list[dict[str, np.ndarray]]:
    """What one of several workers trains on: its part of each batch, in the order of the ranks."""
    return [{name: np.array_split(array, workers)[rank] for name, array in feeds.items()} for feeds in batches]


def endless(batches: list[Any]) -> Iterator[Any]:
    """The batches over and over."""
    return itertools.cycle(batches)


def use_cores(threads: int) -> None:
    """Let this process use so many cores only: for libraries that make a thread for each core there is, and offer no setting."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
