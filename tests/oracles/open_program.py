"""A program opened on an engine without a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.engines import Engine
from burnish.program import Program


def open_program(
    engine: Engine,
    program: Program,
    state: Mapping[str, np.ndarray],
    *,
    device: str | None = None,
    threads: int | None = None,
) -> Any:
    """Lower a program to an engine's target, and open it there; returns the runner."""
    return engine.open(program.graphs.lowered_to(engine.target), state, device=device, threads=threads)
