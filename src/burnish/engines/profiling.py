"""Where the time of a step goes, node by node, on the engines that can tell."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.engines.base import Engine
from burnish.errors import EngineError

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs

OPTIMIZER = "the optimizer"
"""The source of what updates parameters, as ``burnish.graph.annotations.source_of`` gives it."""
UPDATES = (OPTIMIZER, "the updates of several layers")
"""The sources of what updates the state. The second joins small tensors: parameters, or running statistics."""
PROFILERS = {"onnxruntime": "burnish.engines.onnxruntime.profiling", "torch": "burnish.engines.torch.profiling"}
"""The module with ``record_steps`` of each engine that has one, by the engine's name."""


@dataclass(frozen=True)
class NodeRun:
    """One run of a node, or of a call that computes several.

    Attributes:
        step: in which of the recorded steps, from 0.
        operator: what was run.
        node: its name; empty where it has none.
        source: the node of the model that it computes a part of, as ``burnish.graph.annotations.source_of`` gives it; None where
            that is not known.
        start, seconds: when it began, from the beginning of the first step, and how long it took, in seconds.
        bytes: that it read and wrote.
        entries: the state entries whose next values it computes, where that is what it is for: one, or several that are updated
            together.
    """

    step: int
    operator: str
    node: str
    source: str | None
    start: float
    seconds: float
    bytes: int
    entries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """What was recorded of some steps, the first of which is left out, as it also loads the graph.

    Attributes:
        runs: of nodes, in their order.
        steps: how long each step took, in seconds.
    """

    runs: tuple[NodeRun, ...]
    steps: tuple[float, ...]


def updated_entries(
    runs: Iterable[tuple[Hashable, Iterable[Hashable], Iterable[Hashable]]], following: Mapping[Any, Iterable[str]]
) -> dict[Hashable, tuple[str, ...]]:
    """Return the state entries that each run of an update helps to compute the next values of, in the order of ``following``.

    Args:
        runs: of an update, in their order: which it is, what it reads, and what it writes.
        following: for what is the next value of state entries, or is read by what computes that, those entries.
    """
    order = {entry: place for place, entry in enumerate(dict.fromkeys(entry for each in following.values() for entry in each))}
    reached: dict[Hashable, set[str]] = {value: set(entries) for value, entries in following.items()}
    found: dict[Hashable, tuple[str, ...]] = {}
    for run, read, written in reversed(list(runs)):
        entries = set().union(*(reached.get(value, ()) for value in written))
        if entries:
            found[run] = tuple(sorted(entries, key=order.__getitem__))
            for value in read:
                reached.setdefault(value, set()).update(entries)
    return found


def record_steps(
    engine: Engine,
    graphs: LoweredGraphs,
    state: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    *,
    device: str | None = None,
    threads: int | None = None,
    steps: int = 10,
) -> Recording:
    """Run steps on a state of their own, and record when each node ran.

    Args:
        engine: ``onnxruntime`` or ``torch``.
        graphs: those of the program, lowered to the engine's target, for one worker.
        state, inputs: what the first step begins with, and what each is given.
        device, threads: as the engine's ``open`` takes them.
        steps: how many are recorded, after one that is not.

    Raises:
        EngineError: the engine cannot tell.
    """
    if engine.name not in PROFILERS:
        raise EngineError(
            f"The engine '{engine.name}' cannot tell where the time of a step goes: profile on {' or '.join(PROFILERS)} "
            "(--engine)"
        )
    recorder: Any = import_module(PROFILERS[engine.name])
    return recorder.record_steps(engine, graphs, state, inputs, device, threads, steps)
