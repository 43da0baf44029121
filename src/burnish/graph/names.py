"""Names that are free in a graph."""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir


class Names:
    """The names in use, which hands out free ones: each in constant time, whatever many have the same stem.

    Args:
        taken: names in use; those that are None or empty are none.
    """

    def __init__(self, taken: Iterable[str | None] = ()):
        self._taken = {name for name in taken if name}
        self._tried: dict[str, int] = {}

    @classmethod
    def of(cls, graph: ir.Graph) -> Names:
        """The names of all values of a graph, in branches and loop bodies too."""
        values = [*graph.inputs, *graph.initializers.values()]
        values.extend(output for node in graph.all_nodes() for output in node.outputs)
        for body in graph.subgraphs():
            values.extend((*body.inputs, *body.initializers.values()))
        return cls(value.name for value in values)

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, wanted: str) -> str:
        """Return ``wanted``, or where it is in use ``wanted`` with the next free number after it; it is then in use."""
        name = wanted
        if name in self._taken:
            number = self._tried.get(wanted, 0)
            while name in self._taken:
                number += 1
                name = f"{wanted}_{number}"
            self._tried[wanted] = number
        self._taken.add(name)
        return name

    def release(self, name: str | None) -> None:
        """Note that a name is not in use any more."""
        self._taken.discard(name or "")


GENERATED = re.compile(r"val_\d+")
"""The names that ``onnx_ir`` gives, counted in each graph for itself."""


def separate_names(graph: ir.Graph) -> bool:
    """Give values in branches and loop bodies other names, in place, where another value of the graph or of a body has theirs.

    What is emitted into a body is named without a look at the graphs around it, and a name would hide theirs. Generated names
    are never those of what is emitted into the graph later. Returns whether any got another name.
    """
    bodies = list(graph.subgraphs())
    if not bodies:
        return False
    changed, names = False, Names()
    for body in (graph, *bodies):
        for value in (*body.inputs, *body.initializers.values(), *(output for node in body for output in node.outputs)):
            if not value.name:
                continue
            is_generated = body is not graph and GENERATED.fullmatch(value.name)
            name = names.take(f"body_{value.name}" if is_generated else value.name)
            if name != value.name and body is not graph:
                value.name = name
                changed = True
    return changed
