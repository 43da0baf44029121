"""Measure the time of each node in a step, on engines that support it."""

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
"""The source of nodes that update parameters, as ``burnish.graph.annotations.source_of`` returns it."""
UPDATES = (OPTIMIZER, "the updates of several layers")
"""The sources of nodes that update the state. The second updates several small tensors together: parameters, or running
statistics.
"""
PROFILERS = {"onnxruntime": "burnish.engines.onnxruntime.profiling", "torch": "burnish.engines.torch.profiling"}
"""The module with ``record_steps`` for each engine that has one, by the engine's name."""


@dataclass(frozen=True)
class NodeRun:
    """One run of a node, or of a call that computes several.

    Attributes:
        step: number of the recorded step, from 0.
        operator: operator or call.
        node: name of the node; empty if it has none.
        source: the model's node that it computes a part of, as ``burnish.graph.annotations.source_of`` returns it; None if
            unknown.
        start, seconds: start time since the beginning of the first step, and duration, in seconds.
        bytes: bytes read and written.
        entries: the state entries that it updates, if that is its purpose: one, or several that are updated together.
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
    """The recording of some steps, without the first one, which also loads the graph.

    Attributes:
        runs: runs of nodes, in order.
        steps: duration of each step, in seconds.
    """

    runs: tuple[NodeRun, ...]
    steps: tuple[float, ...]


def updated_entries(
    runs: Iterable[tuple[Hashable, Iterable[Hashable], Iterable[Hashable]]], following: Mapping[Any, Iterable[str]]
) -> dict[Hashable, tuple[str, ...]]:
    """Return the state entries that each run of an update helps to compute, in the order of ``following``.

    Args:
        runs: runs of an update, in order: identifier, values that it reads, and values that it writes.
        following: the state entries for each value that is their next value, or is read by the computation of it.
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
    """Run steps on a separate state, and record the time of each node.

    Args:
        engine: ``onnxruntime`` or ``torch``.
        graphs: graphs of the program, lowered to the engine's target, for one worker.
        state, inputs: initial state, and inputs of each step.
        device, threads: as for the engine's ``open``.
        steps: number of recorded steps, after one that is not recorded.

    Raises:
        EngineError: the engine does not support it.
    """
    if engine.name not in PROFILERS:
        raise EngineError(
            f"The engine '{engine.name}' cannot tell where the time of a step goes: profile on {' or '.join(PROFILERS)} "
            "(--engine)"
        )
    recorder: Any = import_module(PROFILERS[engine.name])
    return recorder.record_steps(engine, graphs, state, inputs, device, threads, steps)
