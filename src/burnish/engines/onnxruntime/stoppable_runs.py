"""Runs of ONNX Runtime's sessions that can be stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import onnxruntime

from burnish.stopping import stoppable

Result = TypeVar("Result")


def run_options() -> onnxruntime.RunOptions:
    """Return options of a run, which ``terminate`` stops."""
    options = onnxruntime.RunOptions()
    # The default. ONNX Runtime asks for it at each run, and takes ten times as long to find out that nobody has set it.
    options.add_run_config_entry("gpu_graph_id", "0")
    return options


def run_stoppably(graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a method of a session computes, which takes ``RunOptions`` last.

    Args:
        graph: its name, for messages.
        run: the method; it changes no state.
        arguments: of the method, without the options.

    Raises:
        RunStopped: it was stopped.
    """
    options = run_options()
    return stoppable(options, graph, run, *arguments, options)
