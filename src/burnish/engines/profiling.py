"""Where the time of a step goes, node by node, on the engines that can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.engines.base import Engine
from burnish.errors import EngineError

if TYPE_CHECKING:
    from burnish.compiler.executable import Executable

PROFILERS = {"onnxruntime": "burnish.engines.onnxruntime.profiling", "torch": "burnish.engines.torch.profiling"}
"""The module with ``record_steps`` of each engine that has one, by the engine's name."""


@dataclass(frozen=True)
class NodeRun:
    """One run of a node, or of a call that computes several.

    Attributes:
        step: in which of the recorded steps, from 0.
        operator: what was run.
        node: its name; empty where it has none.
        source: the node of the model that it computes a part of, as ``burnish.graph.describe.source_of`` gives it; None where
            that is not known.
        start, seconds: when it began, from the beginning of the first step, and how long it took, in seconds.
        bytes: that it read and wrote.
    """

    step: int
    operator: str
    node: str
    source: str | None
    start: float
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Recording:
    """What was recorded of some steps, the first of which is left out, as it also loads the graph.

    Attributes:
        runs: of nodes, in their order.
        steps: how long each step took, in seconds.
    """

    runs: tuple[NodeRun, ...]
    steps: tuple[float, ...]


def record_steps(
    engine: Engine,
    executable: Executable,
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
        executable: the program, lowered to the engine's target, for one worker.
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
    return recorder.record_steps(engine, executable, state, inputs, device, threads, steps)
