"""A profile of a step: time and memory traffic by node of the model, forward, backward, update."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from burnish import engines
from burnish.engines import Engine
from burnish.engines.profiling import OPTIMIZER, UPDATES, NodeRun, Recording, record_steps
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.file_writing import replacing
from burnish.graph.annotations import source_of
from burnish.graph.uses import read_by
from burnish.optim.slots import STATE, parameter_of
from burnish.program import Program
from burnish.training.inputs import BatchCheck, HyperparameterCheck
from burnish.validation import is_whole

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)
GRADIENT = "gradient of "
PARAMETER, STATISTIC = "param/", "stat/"
BETWEEN = "between nodes"
"""The row of time outside nodes: calls, binding of inputs, reading of results."""
UNKNOWN = "not attributed"
COLUMNS = ("source", "total_ms", *(f"{phase}_ms" for phase in PHASES), "share", *(f"{phase}_bytes" for phase in PHASES), "runs")


@dataclass
class SourceTime:
    """The cost of a node of the model in a step.

    Attributes:
        source: the node; or ``the loss``, ``the metrics``, ``the random key``, ``between nodes``; or ``the optimizer``, for its
            work besides the updates of parameters that a node reads.
        seconds: seconds per step, by phase.
        bytes: bytes read and written per step, by phase.
        between: seconds per step outside nodes.
        runs: nodes of the step that compute it.
    """

    source: str
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    between: float = 0.0
    runs: float = 0.0

    @property
    def total(self) -> float:
        """Seconds per step, over all phases."""
        return sum(self.seconds.values()) + self.between


@dataclass(frozen=True)
class Profile:
    """The time of a step by node.

    Attributes:
        engine: name of the engine.
        recording: recording of its nodes. Only the faster half of the steps counts: during the others the machine was busy.
        owners: for each state entry, the node of the model that reads it first, or reads its parameter first.
        sizes: sizes of state entries in bytes. If a call updates several, its time and bytes are divided in proportion.
    """

    engine: str
    recording: Recording
    owners: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, including the profiler's overhead."""
        return sum(self.recording.steps[step] for step in self._counted) / len(self._counted)

    @cached_property
    def _counted(self) -> frozenset[int]:
        """The faster half of the steps."""
        times = self.recording.steps
        return frozenset(sorted(range(len(times)), key=times.__getitem__)[: (len(times) + 1) // 2])

    @property
    def sources(self) -> list[SourceTime]:
        """The nodes of the model by time, the longest first; the times add up to ``step_seconds``."""
        steps = len(self._counted)
        rows: dict[str, SourceTime] = {}
        for run in self.recording.runs:
            if run.step not in self._counted:
                continue
            for source, phase, share in self._places(run):
                row = rows.setdefault(source, SourceTime(source))
                row.seconds[phase] += share * run.seconds / steps
                row.bytes[phase] += share * run.bytes / steps
                row.runs += 1 / steps
        left = max(0.0, self.step_seconds - sum(row.total for row in rows.values()))
        return sorted([*rows.values(), SourceTime(BETWEEN, between=left)], key=lambda row: -row.total)

    def _places(self, run: NodeRun) -> list[tuple[str, str, float]]:
        """The rows of a run, with the phase and the run's share of each."""
        owned = [entry for entry in run.entries if entry in self.owners]
        if not owned:
            return [(*_place(run), 1.0)]
        phase = FORWARD if all(entry.startswith(STATISTIC) for entry in owned) else UPDATE
        sizes: dict[str, int] = {}
        for entry in owned:
            sizes[self.owners[entry]] = sizes.get(self.owners[entry], 0) + self.sizes.get(entry, 1)
        return [(source, phase, size / sum(sizes.values())) for source, size in sizes.items()]

    @property
    def phases(self) -> dict[str, float]:
        """Seconds per step by phase; time between nodes is left out."""
        return {phase: sum(row.seconds[phase] for row in self.sources) for phase in PHASES}

    def table(self) -> list[list[Any]]:
        """Return a row for each source: the columns of ``COLUMNS``, times in milliseconds."""
        return [
            [
                row.source,
                1000 * row.total,
                *(1000 * row.seconds[phase] for phase in PHASES),
                row.total / self.step_seconds,
                *(round(row.bytes[phase]) for phase in PHASES),
                round(row.runs),
            ]
            for row in self.sources
        ]

    def write_table(self, path: str | Path) -> None:
        """Write the table as ``.csv``.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with replacing(_made(path)) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(self.table())

    def write_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing and https://ui.perfetto.dev, with a lane for each phase.

        Source: Trace Event Format (Google, 2016), complete events ("ph": "X"), times in microseconds.

        Raises:
            CheckpointError: the file cannot be written.
        """
        names = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": phase}}
            for lane, phase in enumerate(PHASES)
        ]
        events = []
        for run in self.recording.runs:
            places = self._places(run)
            phase = places[0][1]
            told = {"source": "; ".join(source for source, _, _ in places), "node": run.node, "bytes": run.bytes}
            told |= {"entries": [*run.entries]} if run.entries else {}
            times = {"ts": 1e6 * run.start, "dur": 1e6 * run.seconds}
            events.append(
                {"ph": "X", "pid": 1, "tid": PHASES.index(phase), "name": run.operator, "cat": phase, **times, "args": told}
            )
        content = {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"engine": self.engine}}
        with replacing(_made(path)) as partial:
            partial.write_text(json.dumps(content), encoding="utf-8")


def profile(
    program: Program,
    batch: Mapping[str, Any],
    engine: str | Engine = "auto",
    *,
    device: str | None = None,
    threads: int | None = None,
    steps: int = 10,
    seed: int = 0,
) -> Profile:
    """Run steps on a separate state, and return their time by node.

    Args:
        program: the program, run from its initial state.
        batch: batch of every step, as in ``Session.step``.
        engine, device, threads: as in ``Session``; ``onnxruntime`` and ``torch`` support profiles.
        steps: number of recorded steps, after one that is not recorded.
        seed: seed of the random key.

    Raises:
        ConfigurationError: ``steps`` is not a whole number of at least one.
        InputError: the batch does not fit the program.
        EngineError: the engine does not support profiles, or fails.
    """
    if not is_whole(steps) or steps < 1:
        raise ConfigurationError(f"steps={steps!r}: give a whole number of at least one")
    runs_on = engines.get(engine)
    signature = program.signature["step"]
    inputs = {**BatchCheck(signature)(batch), **HyperparameterCheck(signature)({})}
    graphs, state = program.graphs.lowered_to(runs_on.target), program.initial_state(seed)
    sizes = {name: array.nbytes for name, array in state.items()}
    recording = record_steps(runs_on, graphs, state, inputs, device=device, threads=threads, steps=steps)
    return Profile(runs_on.name, recording, owners_of(program), sizes)


def owners_of(program: Program) -> dict[str, str]:
    """Return, for parameters, their slots and statistics, the node of the model that reads them first."""
    graph = program.graphs.unlowered("grad").graph
    readers: dict[str, str] = {}
    entries = {value: value.name or "" for value in graph.inputs if (value.name or "").startswith((PARAMETER, STATISTIC))}
    for node in graph:
        source = source_of(node)
        for value in read_by(node):
            entry = entries.get(value)
            if entry is None:
                continue
            if source is None:  # a cast or another node from a pass: continue with the readers of its result
                entries |= dict.fromkeys(node.outputs, entry)
            elif not source.startswith(GRADIENT):
                readers.setdefault(entry, source)
    updates = program.signature["step"].updates
    slots = {entry: PARAMETER + name for entry in updates if entry.startswith(STATE) and (name := parameter_of(entry))}
    return readers | {entry: readers[parameter] for entry, parameter in slots.items() if parameter in readers}


def _place(run: NodeRun) -> tuple[str, str]:
    source = run.source or UNKNOWN
    if source in UPDATES:
        return OPTIMIZER, UPDATE
    if source.startswith(GRADIENT):
        return source.removeprefix(GRADIENT), BACKWARD
    return source, FORWARD


def _made(path: str | Path) -> Path:
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be written: {error}. Choose a file you can write to") from error
    return path


def shortened(rows: Sequence[Sequence[Any]], most: int) -> list[list[Any]]:
    """Return the first rows of a table, and a row with the sums of the others."""
    if len(rows) <= most + 1:
        return [list(row) for row in rows]
    rest = rows[most:]
    return [*map(list, rows[:most]), [f"{len(rest)} others", *(sum(column) for column in list(zip(*rest, strict=True))[1:])]]
