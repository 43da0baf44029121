"""How a node is described, and what the metadata of nodes and values say: sources, marks, sample axes, subgradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.settings import is_natural_text
from burnish.untrusted import UNREADABLE, read_json

SOURCE_METADATA = "burnish.source"
"""Where a node of a program says, for a reader, what it computes a part of: ``gradient of Conv 'stem'``."""


def describe_node(node: ir.Node) -> str:
    """Return ``Conv 'layer1/conv' (output 'layer1_out')``: what a reader needs to find the node in a viewer."""
    operator = node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"
    name = f" '{node.name}'" if node.name else ""
    output = next((value.name for value in node.outputs if value.name), None)
    return f"{operator}{name}" + (f" (output '{output}')" if output else "")


def describe_place(node: ir.Node) -> str:
    """Return how a node of a program is named, and after it the node of the model that it computes a part of."""
    return place(describe_node(node), source_of(node))


def describe_lookup(node: ir.Node) -> str:
    """Return how the place of a node is described, and of one that looks rows up which state entry they are rows of."""
    table = table_of(node)
    return describe_place(node) + ("" if table is None else f", which looks up rows of '{table}'")


def table_of(node: ir.Node) -> str | None:
    """Return the name of what a Gather reads rows of, where nothing computes it."""
    data = node.inputs[0] if (node.domain, node.op_type) == ("", "Gather") else None
    return data.name if data is not None and data.producer() is None else None


def place(node: str, source: str | None) -> str:
    """Return ``MatMul 'scores' (output 'y') of the gradient of Gemm 'fc' (output 'logits')``, from the two descriptions."""
    if source is None or source == node:
        return node
    return f"{node} of {source}" if source.startswith("the ") else f"{node} of the {source}"


def name_sources(graph: ir.Graph) -> None:
    """Let every node of a model, and what replaces it, say which node of the model it is; see ``source_of``."""
    for node in graph.all_nodes():
        node.metadata_props[SOURCE_METADATA] = describe_node(node)


def source_of(node: ir.Node) -> str | None:
    """Return what a node of a program computes a part of, or None where nobody noted it.

    That is a node of the model (``Conv 'stem' (output 'stem_out')``), ``gradient of`` one, ``the loss``, ``the metrics``,
    ``the optimizer`` or ``the random key``.
    """
    return node.metadata_props.get(SOURCE_METADATA)


Mark = TypeVar("Mark")


def read_mark(node: ir.Node, key: str, kind: type[Mark]) -> Mark | None:
    """Return what the metadata of a node says under a key; None where it says nothing.

    Args:
        node: of a model, perhaps from elsewhere.
        key: of the entry.
        kind: the dataclass whose fields the entry has.

    Raises:
        ModelError: the entry is no JSON, or has other fields.
    """
    text = node.metadata_props.get(key)
    if text is None:
        return None
    try:
        fields: dict[str, Any] = read_json(text)
        return kind(**fields)
    except UNREADABLE as error:
        raise ModelError(
            f"{describe_node(node)} has an entry '{key}' in its metadata that this burnish cannot read ({error!r}): quantize or "
            "prune the model again, or remove the entry"
        ) from error


PRUNING = "burnish.pruning"


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
        node.metadata_props[PRUNING] = json.dumps(asdict(self))

    @staticmethod
    def of(node: ir.Node) -> PruningMark | None:
        """Return what the metadata of a node says; None where it says nothing."""
        return read_mark(node, PRUNING, PruningMark)


def changing_masks(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the masks that training changes; a mean of several is no mask."""
    masks = (node.inputs[1] for node, mark in masked_weights(graph) if mark.changes)
    return frozenset(mask.name or "" for mask in masks if mask is not None)


def masked_weights(graph: ir.Graph) -> Iterator[tuple[ir.Node, PruningMark]]:
    """Give the products of a weight, their first operand, and a mask, their second, with what they say."""
    for node in graph.all_nodes():
        if node.op_type == "Mul" and (mark := PruningMark.of(node)) is not None:
            yield node, mark


SAMPLE_AXIS = "burnish.sample_axis"
NOTHING = "none"
UNNAMED_AXES = "burnish.unnamed_axes"
"""The entry of an input's ``meta`` that lists its axes with open dimensions without a name in the file."""


def mark_sample_axis(value: ir.Value, axis: int | None) -> None:
    """Note the axis of an input along which samples stand; None: it has no samples, and is the same for all of them."""
    value.metadata_props[SAMPLE_AXIS] = NOTHING if axis is None else str(axis)


def has_sample_axis_mark(value: ir.Value) -> bool:
    """Whether a graph says which axis of an input holds samples."""
    return SAMPLE_AXIS in value.metadata_props


def marked_sample_axis(value: ir.Value) -> int | None:
    """Return the axis that is noted: 0 without a note; None for an input without samples, and one without axes.

    Raises:
        ModelError: the note is no axis of the input.
    """
    rank = None if value.shape is None else len(value.shape)
    text = value.metadata_props.get(SAMPLE_AXIS, "0" if rank != 0 else NOTHING)
    if text == NOTHING:
        return None
    if not is_natural_text(text) or (rank is not None and int(text) >= rank):
        raise ModelError(
            f"the metadata '{SAMPLE_AXIS}' of the input '{value.name}' of shape {value.shape} is {text!r}, which is no axis of "
            "it: say which axis holds the samples (sample_axis=..., --sample-axis), or export the model again"
        )
    return int(text)


SUBGRADIENT = "burnish.subgradient"
"""The entry of a node's ``metadata_props``."""
FIRST = "first"
"""Of extremes along an axis, or of equal operands, the first alone has a gradient; else they share it evenly."""
INCLUSIVE = "inclusive"
"""On a bound the gradient passes, as in ``torch.clamp``; else it does not, as in ``torch.nn.functional.hardtanh``."""

WHOLE = "whole"
"""The gradient passes beyond the bound too, as where PyTorch bounds the lengths of ``cosine_similarity``."""


def subgradient_of(node: ir.Node) -> str | None:
    """Return the subgradient that is noted with a node; None for the operator's own."""
    return node.metadata_props.get(SUBGRADIENT)
