"""Measure the time of each node in a step on ONNX Runtime, with its own profiler."""

from __future__ import annotations

import bisect
import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.engines.onnxruntime.engine import OnnxRuntimeEngine
from burnish.engines.onnxruntime.runner import OnnxRuntimeRunner
from burnish.engines.profiling import UPDATES, NodeRun, Recording, updated_entries
from burnish.graph.annotations import source_of
from burnish.graph.uses import read_by

KERNEL = "_kernel_time"
MICROSECONDS = 1e-6
SIZES = ("output_size", "activation_size", "parameter_size")
"""The byte counts in an event: outputs, and inputs that are activations and constants."""


def record_steps(
    engine: OnnxRuntimeEngine,
    graphs: LoweredGraphs,
    state: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    device: str | None,
    threads: int | None,
    steps: int,
) -> Recording:
    """Run steps, and record the time of each node; see ``burnish.engines.profiling.record_steps``."""
    with tempfile.TemporaryDirectory(prefix="burnish-profile-") as folder:
        profiled = copy.copy(engine)
        profiled.profile_prefix = str(Path(folder, "step"))
        runner = profiled.open(graphs, state, device=device, threads=threads)
        assert isinstance(runner, OnnxRuntimeRunner)  # there are no other workers
        for _ in range(steps + 1):
            runner.step(inputs)
        recordings = []
        for opened in runner.graphs_of_step():
            path = Path(opened.session.end_profiling())
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
            recordings.append(recording_of(events, opened.model, graphs.signature["step"].updates, steps))
    return joined_recording(recordings)


def joined_recording(recordings: Sequence[Recording]) -> Recording:
    """Return one recording of steps that ran several graphs one after another, without the time between two graphs.

    Args:
        recordings: recordings of the graphs, in execution order, with the same number of steps.
    """
    if len(recordings) == 1:
        return recordings[0]
    steps = tuple(map(sum, zip(*(recording.steps for recording in recordings), strict=True)))
    runs = []
    for step in range(len(steps)):
        place = float(sum(steps[:step]))
        for recording in recordings:
            own = [run for run in recording.runs if run.step == step]
            runs += [replace(run, start=run.start - own[0].start + place) for run in own]
            place += recording.steps[step]
    return Recording(tuple(runs), steps)


def recording_of(events: list[dict[str, Any]], model: ir.Model, updates: Mapping[str, str], steps: int) -> Recording:
    """Return the last steps among the events of ONNX Runtime's profiler, with the node of each event.

    Args:
        events: events of the profiler.
        model: graph of the step before ONNX Runtime's optimizers.
        updates: the graph output that is the next value of each state entry.
        steps: number of steps to return.
    """
    entries = _updated(model.graph, updates)
    sources = {node.name or "": source_of(node) for node in model.graph.all_nodes()}
    whole = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])[-steps:]
    begin, starts = whole[0]["ts"], [event["ts"] for event in whole]
    runs = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if event.get("cat") != "Node" or not event["name"].endswith(KERNEL) or event["ts"] < begin:
            continue
        name, told = event["name"].removesuffix(KERNEL), event["args"]
        step = bisect.bisect_right(starts, event["ts"]) - 1
        size = sum(int(told.get(kind) or 0) for kind in SIZES)
        place, duration = (event["ts"] - begin) * MICROSECONDS, event["dur"] * MICROSECONDS
        known = _known(name, sources)
        source, updated = sources.get(known), entries.get(known, ())
        runs.append(NodeRun(step, told.get("op_name", ""), name, source, place, duration, size, updated))
    return Recording(tuple(runs), tuple(event["dur"] * MICROSECONDS for event in whole))


def _known(name: str, sources: Mapping[str, str | None]) -> str:
    """Return the name of a node, or of the model's node whose name is its prefix, if ONNX Runtime derived it."""
    whole = name
    while name not in sources and "_" in name:
        name = name.rpartition("_")[0]
    return name if name in sources else whole


def _updated(graph: ir.Graph, updates: Mapping[str, str]) -> dict[Any, tuple[str, ...]]:
    outputs = {output: entry for entry, output in updates.items()}
    following = {value: [outputs[value.name]] for value in graph.outputs if value.name in outputs}
    runs = ((node.name or "", read_by(node), node.outputs) for node in graph if source_of(node) in UPDATES)
    return updated_entries(runs, following)
