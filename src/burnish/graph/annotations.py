"""Descriptions of nodes for messages, and annotations of nodes, values, graphs and models. Each key is declared once.

An ``Annotation`` is text in ``metadata_props`` and is saved to files; a ``Fact`` exists only in memory. Annotations of a single
feature are declared with it: ``QUANTIZATION`` in ``burnish.quantization.graph``, ``NUMBERED`` in ``burnish.random.places``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Literal, TypeVar

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.settings import is_natural_text
from burnish.untrusted_files import UNREADABLE, read_json

Said = TypeVar("Said")
Holder = ir.Node | ir.Value | ir.Graph | ir.Model


@dataclass(frozen=True)
class Annotation(Generic[Said]):
    """A value stored as text in the metadata of a node, value, graph or model. Copies, saved models and exports keep it.

    Attributes:
        key: key in ``metadata_props``.
        write: converts a value to text.
        read: converts the text back; readers of untrusted files must handle its exceptions.
    """

    key: str
    write: Callable[[Said], str]
    read: Callable[[str], Said]

    def get(self, holder: Holder) -> Said | None:
        """Return the value, or None if there is none."""
        text = holder.metadata_props.get(self.key)
        return None if text is None else self.read(text)

    def set(self, holder: Holder, said: Said) -> None:
        """Store a value, replacing any earlier one."""
        holder.metadata_props[self.key] = self.write(said)

    def remove(self, holder: Holder) -> None:
        holder.metadata_props.pop(self.key, None)

    def is_on(self, holder: Holder) -> bool:
        """True if there is a value."""
        return self.key in holder.metadata_props

    def hand_on(self, holder: Holder, other: Holder) -> None:
        """Copy the value to another holder unless that has one."""
        text = holder.metadata_props.get(self.key)
        if text is not None:
            other.metadata_props.setdefault(self.key, text)


@dataclass(frozen=True)
class Fact(Generic[Said]):
    """A value in the ``meta`` of a node, value, graph or model. Files do not keep it.

    Attributes:
        key: key in ``meta``.
    """

    key: str

    def get(self, holder: Holder) -> Said | None:
        """Return the value, or None if there is none."""
        said: Said | None = holder.meta.get(self.key)
        return said

    def set(self, holder: Holder, said: Said) -> None:
        """Store a value, replacing any earlier one."""
        holder.meta[self.key] = said

    def is_on(self, holder: Holder) -> bool:
        """True if there is a value."""
        return self.key in holder.meta


def text(key: str) -> Annotation[str]:
    """Return an annotation that is a text."""
    return Annotation(key, str, str)


def lines(key: str) -> Annotation[Sequence[str]]:
    """Return an annotation that is a list of texts, one per line; no text gives an empty list."""
    return Annotation(key, "\n".join, lambda said: tuple(said.split("\n")) if said else ())


def flag(key: str, written: str = "") -> Annotation[bool]:
    """Return an annotation that is present or absent; ``written`` is its text."""
    return Annotation(key, lambda _: written, lambda _: True)


def record(key: str, kind: type[Said]) -> Annotation[Said]:
    """Return an annotation that is a dataclass, stored as JSON of its fields. Reading it may raise ``UNREADABLE``."""
    return Annotation(key, lambda said: json.dumps(asdict(said)), lambda said: kind(**read_json(said)))  # type: ignore[call-overload]


def json_of(key: str, **options: Any) -> Annotation[Any]:
    """Return an annotation that is JSON. ``options`` go to ``json.dumps``. Reading it may raise ``UNREADABLE``."""
    return Annotation(key, lambda said: json.dumps(said, **options), read_json)


SOURCE = text("burnish.source")
"""Node of a program: description, for readers, of the operation that it is part of, such as ``gradient of Conv 'stem'``."""
ORIGIN = lines("burnish.origin")
"""Node: names of the source node in the model, of its output and its weights. Nodes emitted before it inherit them."""
NEVER_REPEATED = flag("burnish.never_repeated")
"""Node that runs once and keeps its outputs: a collective between replicas."""
RECOMPUTES = lines("burnish.recomputes")
"""Node of a recomputation: names of the recomputed values. Empty for a node that only delays others."""
POLICY = text("burnish.norm.policy")
"""Semantic operator of a training graph: the policy for its statistics of the whole batch. Several workers use it to find the
values to synchronize. Layers with the policy ghost have none: their sample groups do not cross workers, and only their running
statistics are averaged.
"""
LAYER = text("burnish.norm.layer")
"""Next to ``POLICY``: the layer of the statistics."""
BRANCH_LAYER = text("burnish.norm.branch")
"""If node: the layer in its branches that takes batch statistics. Branches are lowered early."""
EXACT = flag("burnish.exact", "true")
"""Layer that adds products of whole numbers: kernels must not use other, rounded products."""
COMPUTED = flag("burnish.computed")
"""Constant computed when the model was read. It is not a weight, in exports either."""
FOLDED = text("burnish.folded_normalization")
"""Layer that batch normalization was folded into: the name of the normalization node."""

CLASSES = json_of("burnish.classes", ensure_ascii=False)
"""Model: list of class names, by index."""
CLASS_NUMBERS = json_of("burnish.class_numbers", ensure_ascii=False)
"""Model: list of a classifier's integer class labels, if they differ from the indices."""
ZIP_MAPS = json_of("burnish.zip_maps", ensure_ascii=False)
"""Model: outputs that were maps, {output: attributes of the ZipMap}."""
COLUMNS = json_of("burnish.columns", ensure_ascii=False)
"""Model: columns of its input table."""
INITIAL = flag("burnish.initial_weights", "true")
"""Model: its weights are initial and untrained. Exports do not keep it."""
TARGETS = json_of("burnish.targets", ensure_ascii=False)
"""Model: table columns of the targets, if they are numbers or yes/no."""
OUTPUT_SCALE = json_of("burnish.output_scale")
"""Model of numeric targets: the output whose last two nodes, Mul and Add, restore the original units: ``output``, ``mean``,
``std``.
"""
PIXELS = json_of("burnish.pixels", ensure_ascii=False)
"""Model: preprocessing of image pixels."""
SOUND = json_of("burnish.sound", ensure_ascii=False)
"""Model: preprocessing of sound."""
TEXT = json_of("burnish.text", ensure_ascii=False)
"""Model: tokenization of text."""
ADAPTERS = json_of("burnish.adapters", sort_keys=True)
"""Model: its adapters."""
OBJECTIVE = json_of("burnish.objective", sort_keys=True)
"""Model: its training objective: ``loss``, ``metrics`` and ``outputs``."""
FIGURES = json_of("burnish.metrics")
"""Fine-tuned model: its final metrics."""

HELD = Fact[bool]("burnish.held")
"""Initializer that is not a weight for any reader: scales of integers, a table of angles."""
PREPARES = Fact[str]("burnish.prepares")
"""Initializer that only preprocesses the data or encodes positions: its purpose, in words."""
DEPARTURES = Fact[tuple[str, ...]]("burnish.departures")
"""Graph: sentences about results of the canonical model that differ from those of the file."""
OF_MODULE = Fact[bool]("burnish.of_module")
"""Graph from a PyTorch module, with known parameters and buffers."""
SHAPE_READER = Fact[str]("burnish.shape_reader")
"""Initializer: the operator that read its shape, which is now a constant."""
FIXED_BY = Fact[dict[int, str]]("burnish.fixed_by")
"""Input: axis -> the layer that fixes its extent, in words."""
UNNAMED_AXES = Fact[list[int]]("burnish.unnamed_axes")
"""Input: axes with open dimensions that have no name in the file."""
NAME_IN_BODY = Fact[str]("burnish.name_in_body")
"""Initializer lifted out of a branch or loop body: its name there."""
LEFT_OUT = Fact[dict[str, ir.Value]]("burnish.weights_of_branches")
"""Main graph: weights removed with branches that are never taken, by name."""
BRANCH_OF = Fact[str]("burnish.branch_of")
"""Weight removed with a branch: its If node."""


def describe_node(node: ir.Node) -> str:
    """Return a text such as ``Conv 'layer1/conv' (output 'layer1_out')``, enough to find the node in a viewer."""
    operator = node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"
    name = f" '{node.name}'" if node.name else ""
    output = next((value.name for value in node.outputs if value.name), None)
    return f"{operator}{name}" + (f" (output '{output}')" if output else "")


def describe_place(node: ir.Node) -> str:
    """Return the description of a program's node, followed by the model node that it belongs to."""
    return place(describe_node(node), source_of(node))


def describe_lookup(node: ir.Node) -> str:
    """Return ``describe_place``, with the name of the table if the node is a lookup."""
    table = table_of(node)
    return describe_place(node) + ("" if table is None else f", which looks up rows of '{table}'")


def table_of(node: ir.Node) -> str | None:
    """Return the name of the table that a Gather reads rows of; None if the table is computed."""
    data = node.inputs[0] if (node.domain, node.op_type) == ("", "Gather") else None
    return data.name if data is not None and data.producer() is None else None


def place(node: str, source: str | None) -> str:
    """Return ``MatMul 'scores' (output 'y') of the gradient of Gemm 'fc' (output 'logits')`` from the two descriptions."""
    if source is None or source == node:
        return node
    return f"{node} of {source}" if source.startswith("the ") else f"{node} of the {source}"


def name_sources(graph: ir.Graph) -> None:
    """Record in every node of a model its own description, for the nodes that will replace it; see ``source_of``."""
    for node in graph.all_nodes():
        SOURCE.set(node, describe_node(node))


def source_of(node: ir.Node) -> str | None:
    """Return the operation that a node of a program is part of, or None if unknown.

    It is a node of the model (``Conv 'stem' (output 'stem_out')``), ``gradient of`` one, ``the loss``, ``the metrics``, ``the
    optimizer`` or ``the random key``.
    """
    return SOURCE.get(node)


def read_mark(node: ir.Node, annotation: Annotation[Said]) -> Said | None:
    """Return the quantization or pruning annotation of a node in a possibly foreign model.

    Raises:
        ModelError: the entry is not JSON or has unknown fields.
    """
    try:
        return annotation.get(node)
    except UNREADABLE as error:
        raise ModelError(
            f"{describe_node(node)} has an entry '{annotation.key}' in its metadata that this burnish cannot read ({error!r}): "
            "quantize or prune the model again, or remove the entry"
        ) from error


@dataclass(frozen=True)
class PruningMark:
    """Schedule of a weight's pruning mask during training.

    Attributes:
        sparsity: final fraction of zeros.
        scope: the fraction applies to each tensor or to all tensors together.
        begin, end: first and last step of the growth of the fraction; equal for a fixed mask.
        every: number of steps between two changes.
    """

    sparsity: float
    scope: Literal["tensor", "global"]
    begin: int = 0
    end: int = 0
    every: int = 1

    @property
    def changes(self) -> bool:
        return self.end > self.begin

    def put(self, node: ir.Node) -> None:
        PRUNING.set(node, self)

    @staticmethod
    def of(node: ir.Node) -> PruningMark | None:
        return read_mark(node, PRUNING)


PRUNING = record("burnish.pruning", PruningMark)
"""Product of a weight and its mask: the mask's schedule."""


def changing_masks(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the masks that training changes; workers must not average them."""
    masks = (node.inputs[1] for node, mark in masked_weights(graph) if mark.changes)
    return frozenset(mask.name or "" for mask in masks if mask is not None)


def masked_weights(graph: ir.Graph) -> Iterator[tuple[ir.Node, PruningMark]]:
    """Yield the products of a weight (first operand) and a mask (second), with the mask's schedule."""
    for node in graph.all_nodes():
        if node.op_type == "Mul" and (mark := PruningMark.of(node)) is not None:
            yield node, mark


NOTHING = "none"
SAMPLE_AXIS = text("burnish.sample_axis")
"""Input: index of the sample axis; ``NOTHING`` if the input is the same for all samples."""


def mark_sample_axis(value: ir.Value, axis: int | None) -> None:
    """Record the sample axis of an input; None if the input is the same for all samples."""
    SAMPLE_AXIS.set(value, NOTHING if axis is None else str(axis))


def has_sample_axis_mark(value: ir.Value) -> bool:
    """True if the sample axis of an input is recorded."""
    return SAMPLE_AXIS.is_on(value)


def marked_sample_axis(value: ir.Value) -> int | None:
    """Return the recorded sample axis of an input: 0 by default; None if it has no samples or no axes.

    Raises:
        ModelError: the recorded axis does not exist.
    """
    rank = None if value.shape is None else len(value.shape)
    said = SAMPLE_AXIS.get(value)
    if said is None:
        said = "0" if rank != 0 else NOTHING
    if said == NOTHING:
        return None
    if not is_natural_text(said) or (rank is not None and int(said) >= rank):
        raise ModelError(
            f"the metadata '{SAMPLE_AXIS.key}' of the input '{value.name}' of shape {value.shape} is {said!r}, which is no axis "
            "of it: say which axis holds the samples (sample_axis=..., --sample-axis), or export the model again"
        )
    return int(said)


SUBGRADIENT = text("burnish.subgradient")
"""Node from a file of PyTorch: choice of the subgradient at a tie or a bound."""
FIRST = "first"
"""Only the first of tied extremes, or of equal operands, gets the gradient; by default they share it evenly."""
INCLUSIVE = "inclusive"
"""The gradient passes at the bound, as in ``torch.clamp``; by default it does not, as in ``torch.nn.functional.hardtanh``."""

WHOLE = "whole"
"""The gradient passes beyond the bound too, as for the norms in PyTorch's ``cosine_similarity``."""


def subgradient_of(node: ir.Node) -> str | None:
    """Return the recorded subgradient of a node; None for the operator's own."""
    return SUBGRADIENT.get(node)
