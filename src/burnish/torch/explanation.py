"""What of a module burnish computes, what PyTorch, and why."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from burnish.engines.torch.engine import TorchEngine
from burnish.torch.arguments import arguments
from burnish.torch.backend import Part, captures_recurrence, compile_graph, reported

SHOWN = 6
"""Operators of a part that the text names."""


@dataclass(frozen=True)
class Break:
    """Where ``forward`` is not captured, and Python goes on: a branch that depends on data, for example.

    Attributes:
        reason: as PyTorch gives it.
        line: of the user's code.
        function: what PyTorch computes as a whole because of that, but for what it calls: Dynamo makes no graphs of a function
            that it has to leave inside of a loop. None where there are graphs before and after the line.
    """

    reason: str
    line: str
    function: str | None = None


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
            left = f"all of {end.function}, but for the functions that it calls: " if end.function else ""
            lines.append(f"Python: {left}{end.reason}" + (f"\n    {end.line}" if end.line else ""))
        return "\n".join(lines)


def explain(model: torch.nn.Module, inputs: Any, engine: TorchEngine | None = None) -> Explanation:
    """Report what ``torch.compile(model, backend="burnish")``, and ``wrap(..., partial=True)``, let burnish compute.

    A copy of the model is called twice, so that nothing of it changes; what ``torch.compile`` compiled before in this process is
    compiled again at the next call. Recurrent layers are captured, as in ``wrap(..., partial=True)``; ``torch.compile`` does
    that where ``torch._dynamo.config.allow_rnn`` is set.

    Args:
        model: the model.
        inputs: what it is called with: a tuple or list of its arguments, a dictionary of those by name, or the only one.
        engine: what runs burnish's parts; by default ``TorchEngine()``.
    """
    args, kwargs = arguments(inputs)
    with captures_recurrence(model):
        captured = torch._dynamo.explain(copy.deepcopy(model))(*args, **kwargs)
        with reported() as graphs:
            compiled = torch.compile(copy.deepcopy(model), backend=functools.partial(compile_graph, engine=engine))
            clear_compilation_metrics()
            compiled(*args, **kwargs)
    breaks = [Break(_reason(str(end.reason)), _line(end.user_stack)) for end in captured.break_reasons if end.graph_break]
    breaks += _functions_left()
    return Explanation(tuple(part for parts in graphs for part in parts), tuple(breaks))


def _functions_left() -> list[Break]:
    """The functions that Dynamo made no graph of in the last call, as its records of compilations have them."""
    left = {}
    for record in get_compilation_metrics():
        if record.fail_reason:
            line = f'File "{record.fail_user_frame_filename}", line {record.fail_user_frame_lineno}, in {record.co_name}'
            left[line] = Break(_reason(record.fail_reason), line, record.co_name)
    return list(left.values())


def _reason(reason: str) -> str:
    """A reason of Dynamo's, without its hints and what it says to developers."""
    reason = " ".join(reason.split()).replace(" Explanation: ", ": ", 1)
    for end in (" Hint: ", " Developer debug context: ", " The branch condition "):
        reason = reason.partition(end)[0]
    depends_on_data = reason.startswith(("generic_jump", "Data-dependent branching"))
    return f"a branch that depends on data ({reason})" if depends_on_data else reason


def _line(stack: Any) -> str:
    frame = stack[-1] if stack else None
    return "" if frame is None else f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
