"""What of a module burnish computes, what PyTorch, and why."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.torch.arguments import arguments
from burnish.torch.backend import Part, compile_graph, reported

SHOWN = 6
"""Operators of a part that the text names."""


@dataclass(frozen=True)
class Break:
    """Where ``forward`` is not captured, and Python goes on: a branch that depends on data, for example.

    Attributes:
        reason: as PyTorch gives it.
        line: of the user's code.
    """

    reason: str
    line: str


@dataclass(frozen=True)
class Explanation:
    """The parts of a module, in the order in which they run, and what lies between captured graphs.

    Attributes:
        parts: consecutive operators that burnish or PyTorch computes.
        breaks: where one captured graph ends, and Python goes on.
    """

    parts: tuple[Part, ...]
    breaks: tuple[Break, ...]

    def __str__(self) -> str:
        lines = []
        for part in self.parts:
            more = len(part.operators) - SHOWN
            operators = ", ".join(part.operators[:SHOWN]) + (f" and {more} more" if more > 0 else "")
            why = f" ({part.reason})" if part.reason else ""
            lines.append(f"graph {part.graph}: {part.runs_in}: {operators}{why}" + (f"\n    {part.line}" if part.line else ""))
        for end in self.breaks:
            lines.append(f"Python: {end.reason}" + (f"\n    {end.line}" if end.line else ""))
        return "\n".join(lines)


def explain(model: torch.nn.Module, inputs: Any, engine: TorchEngine | None = None) -> Explanation:
    """Report what ``torch.compile(model, backend="burnish")``, and ``wrap(..., partial=True)``, let burnish compute.

    A copy of the model is called twice, so that nothing of it changes; what ``torch.compile`` compiled before in this process is
    compiled again at the next call.

    Args:
        model: the model.
        inputs: what it is called with: a tuple or list of its arguments, a dictionary of those by name, or the only one.
        engine: what runs burnish's parts; by default ``TorchEngine()``.
    """
    args, kwargs = arguments(inputs)
    captured = torch._dynamo.explain(copy.deepcopy(model))(*args, **kwargs)
    breaks = tuple(Break(_reason(str(end.reason)), _line(end.user_stack)) for end in captured.break_reasons if end.graph_break)
    with reported() as graphs:
        compiled = torch.compile(copy.deepcopy(model), backend=functools.partial(compile_graph, engine=engine))
        compiled(*args, **kwargs)
    return Explanation(tuple(part for parts in graphs for part in parts), breaks)


def _reason(reason: str) -> str:
    reason = " ".join(reason.split())
    return f"a branch that depends on data ({reason})" if reason.startswith("generic_jump") else reason


def _line(stack: Any) -> str:
    frame = stack[-1] if stack else None
    return "" if frame is None else f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
