"""A program as one worker runs it, whose step is finished behind the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir

from burnish.program import Program
from burnish.program.kernel_graphs import SEMANTIC_GRAPHS

Rewrite = Callable[[ir.Model], None]


@dataclass(repr=False)
class WorkerProgram(Program):
    """A program whose step, with the update in it, is rewritten for one worker.

    Attributes:
        rewrites: change the step's graph in place, one after the other.
        marks: semantic operators that they look for, which are not lowered before.
    """

    rewrites: tuple[Rewrite, ...] = ()
    marks: frozenset[str] = frozenset()

    def kernel_graphs(self, kernels: Collection[str], names: Collection[str] = ("step", *SEMANTIC_GRAPHS)) -> dict[str, ir.Model]:
        """As ``Program.kernel_graphs``."""
        graphs = super().kernel_graphs({*kernels, *self.marks}, names)
        for rewrite in self.rewrites if "step" in names else ():
            rewrite(graphs["step"])
        return graphs


def rewritten(program: Program, rewrite: Rewrite, marks: Collection[str] = (), **changes: Any) -> WorkerProgram:
    """Return a program whose step is rewritten, behind the rewrites that it has already.

    Args:
        program: left as it is.
        rewrite: changes the step's graph in place.
        marks: semantic operators that it looks for.
        changes: of other fields of the program.
    """
    if isinstance(program, WorkerProgram):
        return program.changed(rewrites=(*program.rewrites, rewrite), marks=program.marks | set(marks), **changes)
    values = {entry.name: program.__dict__[entry.name] for entry in fields(Program) if entry.init}
    return WorkerProgram(**{**values, **changes}, rewrites=(rewrite,), marks=frozenset(marks))
