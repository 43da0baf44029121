"""What the rows and columns of a draw number, as far as samples go: so that workers draw for theirs what one process would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import describe_node
from burnish.graph.annotations import flag, record
from burnish.untrusted_files import UNREADABLE

EARLIER = flag("burnish.random.places")
"""Of a node that counts rows or columns, in programs of earlier versions: it names axes, which does not tell samples apart."""


@dataclass(frozen=True)
class Places:
    """What rows, or columns, number: ``slower x samples x faster`` places, or the same for every batch.

    Attributes:
        samples: the input whose first axis counts the samples; None where there are none among the places.
        slower: how many times the places run through all samples; None where the others tell it.
        faster: how many places of one sample stand side by side; None where the others tell it.
        problem: why workers cannot know where their samples stand; empty where they can.
    """

    samples: str | None = None
    slower: int | None = 1
    faster: int | None = 1
    problem: str = ""

    def write(self, node: ir.Node) -> None:
        """Note it on the node that counts."""
        NUMBERED.set(node, self)

    @staticmethod
    def read(node: ir.Node) -> Places | None:
        """Return what is noted on a node; None where it does not count places of a draw."""
        if EARLIER.is_on(node):
            return Places(problem="the program was compiled by an earlier version, which did not note where samples stand")
        try:
            return NUMBERED.get(node)
        except UNREADABLE as error:
            raise ModelError(
                f"{describe_node(node)} has an entry '{NUMBERED.key}' in its metadata that cannot be read ({error!r}): "
                "compile the program again"
            ) from error


NUMBERED = record("burnish.random.numbered", Places)
"""Of a node that counts the rows or columns of a draw: what they number."""


class Numbered(NamedTuple):
    """What the rows and the columns of a draw number."""

    rows: Places
    columns: Places


ALIKE = Numbered(Places(), Places())
"""No samples: every worker draws the same."""
NOT_NOTED = Numbered(*[Places(problem="what it is drawn for was not noted")] * 2)
