"""Measure the time of each call in a step on PyTorch."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.engines.profiling import OPTIMIZER, UPDATES, NodeRun, Recording, updated_entries
from burnish.engines.torch.engine import TorchEngine, TorchRunner
from burnish.engines.torch.translate.failures import PLACE, SOURCE
from burnish.errors import EngineError

PARAMETER = "param/"
CALLS = ("call_function", "call_method", "call_module")


def record_steps(
    engine: TorchEngine,
    graphs: LoweredGraphs,
    state: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
    device: str | None,
    threads: int | None,
    steps: int,
) -> Recording:
    """Run steps, and record the time of each call; see ``burnish.engines.profiling.record_steps``.

    On CUDA, each call is synchronized, which takes longer than a step that is recorded as one graph.

    Raises:
        EngineError: the engine compiles whole graphs, in which nodes cannot be distinguished.
    """
    if engine.compile == "inductor":
        raise EngineError("compile='inductor' makes one piece of a graph, in which no node can be timed: profile with 'regions'")
    plain = TorchEngine(
        engine.device,
        compile=engine.compile,
        channels_last=engine.channels_last,
        keep_pages=engine.keep_pages,
        winograd=engine.winograd,
        kernel_choice=engine.kernel_choice,
        tf32=engine.tf32,
        capture=False,
    )
    runner = plain.open(graphs, state, device=device, threads=threads)
    module = runner.translated("step")
    timed = _TimedGraph(module, _updated(module, runner))
    runner._runnables["step"] = timed
    written = _written_in_place(runner)
    # For each entry its present and next value, and for a parameter its gradient too.
    moved = sum((3 if name.startswith(PARAMETER) else 2) * _bytes(runner._state[name]) for name in written)
    seconds = []
    for step in range(-1, steps):  # the first one is not kept
        timed.step = step
        begin = time.perf_counter()
        runner.step(inputs)
        # The in-place updates by the engine's kernels come after the graph.
        end = time.perf_counter()
        timed.runs.append(NodeRun(step, "update", "", OPTIMIZER, timed.ended, end - timed.ended, moved, written))
        seconds.append(end - begin)
    kept = [run for run in timed.runs if run.step >= 0]
    first = kept[0].start
    return Recording(tuple(replace(run, start=run.start - first) for run in kept), tuple(seconds[1:]))


class _TimedGraph(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, updated: Mapping[Any, tuple[str, ...]]):
        super().__init__(module)
        self.updated = updated
        self.runs: list[NodeRun] = []
        self.step = 0
        self.ended = 0.0

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with torch.inference_mode():
            outputs = self.run(*inputs)
        self.ended = time.perf_counter()
        return outputs

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in CALLS:
            return super().run_node(n)
        read = _bytes(self.env[node] for node in n.all_input_nodes)
        begin = time.perf_counter()
        result = super().run_node(n)
        if any(tensor.is_cuda for tensor in _tensors(result)):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        node, source = str(n.meta.get(PLACE) or ""), n.meta.get(SOURCE)
        entries = self.updated.get(n, ())
        self.runs.append(NodeRun(self.step, _operator(n), node, source, begin, seconds, read + _bytes(result), entries))
        return result


def _updated(module: fx.GraphModule, runner: TorchRunner) -> dict[Any, tuple[str, ...]]:
    """Return the state entries that each of the optimizer's calls in the graph updates, directly or through its kernel."""
    entries: dict[str, list[str]] = {}
    for entry, output in runner._graphs.signature["step"].updates.items():
        entries.setdefault(output, []).append(entry)
    for update in runner._updates:
        for operands, written in update.groups:
            for name in operands:
                entries.setdefault(name, []).extend(written)
    following: dict[Hashable, list[str]] = {}
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    for value, name in zip(returned, runner._output_names["step"], strict=True):
        following.setdefault(value, []).extend(entries.get(name, ()))
    calls = [node for node in module.graph.nodes if node.op in CALLS and node.meta.get(SOURCE) in (*UPDATES, None)]
    return updated_entries(((node, node.all_input_nodes, [node]) for node in calls), following)


def _written_in_place(runner: TorchRunner) -> tuple[str, ...]:
    taken = (runner._row_updates, runner._state_update[0])
    by_kernels = [entry for update in taken if update is not None for entry in update.entries]
    return (*by_kernels, *(write.entry for write in runner._row_writes))


def _operator(call: fx.Node) -> str:
    return call.target if isinstance(call.target, str) else getattr(call.target, "__name__", str(call.target))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, str | int | float | None):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
