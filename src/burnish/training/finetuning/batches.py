"""How many samples a step takes: as memory and the number of samples allow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from burnish.analysis.memory_plan import planned_peak
from burnish.program import Program, Role
from burnish.program.layout import samples_first
from burnish.training.epoch_length import fixed_batch

MOST, FEWEST = 32, 8
STEPS_OF_AN_EPOCH = 10
"""An epoch of a small data set has so many steps at least, down to ``FEWEST`` samples in each."""
BESIDE_THE_PLAN = 2
"""What a step takes, in its planned peak: kernels need as much again for themselves."""


def chosen_batch(program: Program, samples: Mapping[str, np.ndarray], count: int) -> tuple[int, str]:
    """Return how many samples a step is to take, and a line that says why.

    Args:
        program: of the training.
        samples: a batch of the data, samples first.
        count: samples in the data.
    """
    fixed = fixed_batch(program)
    if fixed is not None:
        return fixed, f"batch {fixed}: the model takes no other"
    size, why = MOST, ""
    while size > FEWEST and count < STEPS_OF_AN_EPOCH * size:
        size //= 2
    if size < MOST:
        why = f"for {STEPS_OF_AN_EPOCH} steps or so in an epoch of {count:,} samples"
    free = available_memory()
    extents = _extents(program, samples)
    graph = program.semantic.get("grad") or program.grad
    peak = planned_peak(graph, size, extents).bytes
    while free is not None and size > 1 and BESIDE_THE_PLAN * peak > free:
        size //= 2
        peak, why = planned_peak(graph, size, extents).bytes, "as more would not fit"
    planned = f"the step's planned peak is {peak / 1e6:,.0f} MB" + ("" if free is None else f" of {free / 1e9:,.1f} GB free")
    return size, f"batch {size}: {why}{'; ' if why else ''}{planned}"


def available_memory() -> int | None:
    """Return the bytes of memory that are free for this process; None where the system does not say (only Linux does)."""
    free: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
        if limit.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
            free.append(int(most) - int(used.read_text(encoding="ascii")))
    except (OSError, ValueError, IndexError):
        return None
    return min(free, default=None)


def _extents(program: Program, samples: Mapping[str, np.ndarray]) -> dict[str, int]:
    """What the open dimensions beside the batch are in the data."""
    entries = program.signature["step"].inputs_of(Role.DATA, Role.LABEL)
    return {
        extent: size
        for entry in entries
        if entry.name in samples
        for extent, size in zip(samples_first(entry).extents[1:], samples[entry.name].shape[1:], strict=False)
        if isinstance(extent, str)
    }
