"""A report of the parts of a module that burnish and PyTorch compute, with reasons."""

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
"""Number of operators of a part named in the text."""


@dataclass(frozen=True)
class Break:
    """A graph break: capture ends at a line of ``forward`` and Python continues, as at a data-dependent branch.

    Attributes:
        reason: PyTorch's reason.
        line: line of the user's code.
        function: the function that PyTorch therefore runs as a whole, except the functions it calls: Dynamo makes no graphs of a
            function that breaks inside a loop. None if there are graphs before and after the line.
    """

    reason: str
    line: str
    function: str | None = None


@dataclass(frozen=True)
class Explanation:
    """The parts of a module, in execution order, and the breaks between captured graphs.

    Attributes:
        parts: consecutive operators that burnish or PyTorch computes.
        breaks: the lines between captured graphs, run by Python.
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
    """Report the parts that burnish computes under ``torch.compile(model, backend="burnish")`` or ``wrap(..., partial=True)``.

    This calls a copy of the model twice, so the model does not change; functions that ``torch.compile`` compiled earlier in this
    process are compiled again at their next call. Recurrent layers are captured, as in ``wrap(..., partial=True)``;
    ``torch.compile`` captures them only if ``torch._dynamo.config.allow_rnn`` is set.

    Args:
        model: the model.
        inputs: the arguments of a call: a tuple or list, a dictionary by name, or a single argument.
        engine: the engine that runs burnish's parts; by default ``TorchEngine()``.
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
    """Return the functions that Dynamo made no graph of in the last call, from its compilation records."""
    left = {}
    for record in get_compilation_metrics():
        if record.fail_reason:
            line = f'File "{record.fail_user_frame_filename}", line {record.fail_user_frame_lineno}, in {record.co_name}'
            left[line] = Break(_reason(record.fail_reason), line, record.co_name)
    return list(left.values())


def _reason(reason: str) -> str:
    reason = " ".join(reason.split()).replace(" Explanation: ", ": ", 1)
    for end in (" Hint: ", " Developer debug context: ", " The branch condition "):
        reason = reason.partition(end)[0]
    depends_on_data = reason.startswith(("generic_jump", "Data-dependent branching"))
    return f"a branch that depends on data ({reason})" if depends_on_data else reason


def _line(stack: Any) -> str:
    frame = stack[-1] if stack else None
    return "" if frame is None else f'File "{frame.filename}", line {frame.lineno}, in {frame.name}'
