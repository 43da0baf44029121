"""The layout of samples in the rows and columns of a random draw, so that workers draw the same numbers as one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import describe_node
from burnish.graph.annotations import flag, record
from burnish.untrusted_files import UNREADABLE

EARLIER = flag("burnish.random.places")
"""On a node that counts rows or columns, in programs of an earlier format: axes, without the positions of samples."""


@dataclass(frozen=True)
class Places:
    """A layout of ``slower x samples x faster`` places, or one that is the same for every batch.

    Attributes:
        samples: the input whose first axis counts the samples; None if there are no samples.
        slower: number of times that the places run through all samples; None if it follows from the other fields.
        faster: number of adjacent places of one sample; None if it follows from the other fields.
        problem: why workers cannot find their samples; otherwise empty.
    """

    samples: str | None = None
    slower: int | None = 1
    faster: int | None = 1
    problem: str = ""

    def write(self, node: ir.Node) -> None:
        NUMBERED.set(node, self)

    @staticmethod
    def read(node: ir.Node) -> Places | None:
        """Read the layout of a node; None if the node does not count the places of a draw."""
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
"""On a node that counts the rows or columns of a draw: their layout."""


class Numbered(NamedTuple):
    """The layouts of the rows and the columns of a draw."""

    rows: Places
    columns: Places


ALIKE = Numbered(Places(), Places())
"""No samples: all workers draw the same numbers."""
NOT_NOTED = Numbered(*[Places(problem="what it is drawn for was not noted")] * 2)
