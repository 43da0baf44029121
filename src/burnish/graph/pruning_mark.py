"""What the product of a weight and its mask says of how the mask is made, in its metadata: a saved model keeps it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import onnx_ir as ir

from burnish.graph.marks import read_mark

KEY = "burnish.pruning"


@dataclass(frozen=True)
class PruningMark:
    """How the mask of a weight changes during training.

    Attributes:
        sparsity: the part of the weights that is zero in the end.
        scope: whether it is the part of each tensor, or of all together.
        begin, end: the steps between which the part grows; equal where the mask stays as it is.
        every: steps from one change to the next.
    """

    sparsity: float
    scope: Literal["tensor", "global"]
    begin: int = 0
    end: int = 0
    every: int = 1

    @property
    def changes(self) -> bool:
        """Whether training changes the mask."""
        return self.end > self.begin

    def put(self, node: ir.Node) -> None:
        """Write it into the metadata of a node."""
        node.metadata_props[KEY] = json.dumps(asdict(self))

    @staticmethod
    def of(node: ir.Node) -> PruningMark | None:
        """Return what the metadata of a node says; None where it says nothing."""
        return read_mark(node, KEY, PruningMark)


def changing_masks(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the masks that training changes; a mean of several is no mask."""
    masks = (node.inputs[1] for node, mark in masked_weights(graph) if mark.changes)
    return frozenset(mask.name or "" for mask in masks if mask is not None)


def masked_weights(graph: ir.Graph) -> Iterator[tuple[ir.Node, PruningMark]]:
    """Give the products of a weight, their first operand, and a mask, their second, with what they say."""
    for node in graph.all_nodes():
        if node.op_type == "Mul" and (mark := PruningMark.of(node)) is not None:
            yield node, mark
