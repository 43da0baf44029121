"""How a node is described, and annotations: what nodes, values, graphs and models say of themselves, each key declared once.

An ``Annotation`` is text in ``metadata_props``, which files keep; a ``Fact`` is known while a model is in memory. Those of one
feature stand with it: ``QUANTIZATION`` in ``burnish.quantization.graph``, ``NUMBERED`` in ``burnish.random.places``.
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
    """What a node, value, graph or model says of itself, as text in its metadata: copies, saved models and exports keep it.

    Attributes:
        key: of the entry in ``metadata_props``.
        write: makes the text of what is said.
        read: makes that of the text; what it raises is up to whoever reads a file from elsewhere.
    """

    key: str
    write: Callable[[Said], str]
    read: Callable[[str], Said]

    def get(self, holder: Holder) -> Said | None:
        """Return what is said; None if nothing is."""
        text = holder.metadata_props.get(self.key)
        return None if text is None else self.read(text)

    def set(self, holder: Holder, said: Said) -> None:
        """Say it, in place of what was said."""
        holder.metadata_props[self.key] = self.write(said)

    def remove(self, holder: Holder) -> None:
        """Let nothing be said."""
        holder.metadata_props.pop(self.key, None)

    def is_on(self, holder: Holder) -> bool:
        """Whether it is said."""
        return self.key in holder.metadata_props

    def hand_on(self, holder: Holder, other: Holder) -> None:
        """Let another say the same, if it says nothing yet."""
        text = holder.metadata_props.get(self.key)
        if text is not None:
            other.metadata_props.setdefault(self.key, text)


@dataclass(frozen=True)
class Fact(Generic[Said]):
    """What is known of a node, value, graph or model while it is in memory; no file keeps it.

    Attributes:
        key: of the entry in ``meta``.
    """

    key: str

    def get(self, holder: Holder) -> Said | None:
        """Return what is known; None if nothing is."""
        said: Said | None = holder.meta.get(self.key)
        return said

    def set(self, holder: Holder, said: Said) -> None:
        """Note it, in place of what was known."""
        holder.meta[self.key] = said

    def is_on(self, holder: Holder) -> bool:
        """Whether it is known."""
        return self.key in holder.meta


def text(key: str) -> Annotation[str]:
    """An annotation that is a text."""
    return Annotation(key, str, str)


def lines(key: str) -> Annotation[Sequence[str]]:
    """An annotation that is a list of texts, one a line; none of them is a list without texts."""
    return Annotation(key, "\n".join, lambda said: tuple(said.split("\n")) if said else ())


def flag(key: str, written: str = "") -> Annotation[bool]:
    """An annotation that is there, or not: ``written`` is the text of the entry."""
    return Annotation(key, lambda _: written, lambda _: True)


def record(key: str, kind: type[Said]) -> Annotation[Said]:
    """An annotation that is a dataclass, as JSON of its fields. Reading it may raise ``UNREADABLE``."""
    return Annotation(key, lambda said: json.dumps(asdict(said)), lambda said: kind(**read_json(said)))  # type: ignore[call-overload]


def json_of(key: str, **options: Any) -> Annotation[Any]:
    """An annotation that is JSON; ``options`` are those of ``json.dumps``. Reading it may raise ``UNREADABLE``."""
    return Annotation(key, lambda said: json.dumps(said, **options), read_json)


SOURCE = text("burnish.source")
"""Of a node of a program, for a reader: what it computes a part of, such as ``gradient of Conv 'stem'``."""
ORIGIN = lines("burnish.origin")
"""Of a node: the names of the node of the model that it comes from, of its output and weights. What is emitted in front of it
says the same."""
NEVER_REPEATED = flag("burnish.never_repeated")
"""Of a node that runs once and whose outputs are kept: a collective between replicas."""
RECOMPUTES = lines("burnish.recomputes")
"""Of a node that computes values again: the names of those values. A node that only holds others back names none."""
POLICY = text("burnish.norm.policy")
"""Of a semantic operator of a training graph: the policy by which it takes statistics of the whole batch. Several workers find by
it what to synchronize. Layers of the policy ghost say nothing: their groups of samples lie within a worker's part, and only their
running statistics are averaged."""
LAYER = text("burnish.norm.layer")
"""Beside ``POLICY``: the layer for which it takes them."""
BRANCH_LAYER = text("burnish.norm.branch")
"""Of an If: the layer in its branches that takes statistics of the batch. What is in branches is lowered early."""
EXACT = flag("burnish.exact", "true")
"""Of a layer that adds products of whole numbers: no kernel may compute it from other products, which are rounded."""
COMPUTED = flag("burnish.computed")
"""Of a Constant that was computed when a model was read: it is no weight, in exports neither."""
FOLDED = text("burnish.folded_normalization")
"""Of a layer into which batch normalization was folded: the name of that node."""

CLASSES = json_of("burnish.classes", ensure_ascii=False)
"""Of a model: the names of its classes in the order of their indices, a list."""
CLASS_NUMBERS = json_of("burnish.class_numbers", ensure_ascii=False)
"""Of a model: the integers that a classifier calls its classes, if they are not their indices, a list."""
ZIP_MAPS = json_of("burnish.zip_maps", ensure_ascii=False)
"""Of a model: which outputs were maps, {output: attributes of the ZipMap}."""
COLUMNS = json_of("burnish.columns", ensure_ascii=False)
"""Of a model: the columns of the table that it reads."""
INITIAL = flag("burnish.initial_weights", "true")
"""Of a model: its weights are initial ones, which no data have trained. An exported model does not say so."""
TARGETS = json_of("burnish.targets", ensure_ascii=False)
"""Of a model: the columns of a table that its targets were read from, if they are values, or yes and no."""
OUTPUT_SCALE = json_of("burnish.output_scale")
"""Of a model of values: the output whose last two nodes, a Mul and an Add, give values in their own units: ``output``, ``mean``,
``std``."""
PIXELS = json_of("burnish.pixels", ensure_ascii=False)
"""Of a model: what is done to the pixels of the images that it reads."""
SOUND = json_of("burnish.sound", ensure_ascii=False)
"""Of a model: what is done to the sounds that it reads."""
TEXT = json_of("burnish.text", ensure_ascii=False)
"""Of a model: how the texts that it reads become tokens."""
ADAPTERS = json_of("burnish.adapters", sort_keys=True)
"""Of a model: the adapters in it."""
OBJECTIVE = json_of("burnish.objective", sort_keys=True)
"""Of a model: what it was trained on, ``loss``, ``metrics`` and ``outputs``."""
FIGURES = json_of("burnish.metrics")
"""Of a model that was fine-tuned: what it came to."""

HELD = Fact[bool]("burnish.held")
"""Of an initializer that is no weight wherever it is read: the scales of integers, a table of angles."""
PREPARES = Fact[str]("burnish.prepares")
"""Of an initializer that only prepares data for the first layer, or tells positions: which, in words."""
DEPARTURES = Fact[tuple[str, ...]]("burnish.departures")
"""Of a graph: where the canonical model does not compute what the file does, as sentences."""
OF_MODULE = Fact[bool]("burnish.of_module")
"""Of a graph that was made of a PyTorch module, whose parameters and buffers are known."""
SHAPE_READER = Fact[str]("burnish.shape_reader")
"""Of an initializer: which operator read its shape, which is a constant now."""
FIXED_BY = Fact[dict[int, str]]("burnish.fixed_by")
"""Of an input: by axis, the layer that leaves one extent alone, in words."""
UNNAMED_AXES = Fact[list[int]]("burnish.unnamed_axes")
"""Of an input: its axes with open dimensions without a name in the file."""
NAME_IN_BODY = Fact[str]("burnish.name_in_body")
"""Of an initializer that was lifted out of a branch or loop body: what it was called there."""
LEFT_OUT = Fact[dict[str, ir.Value]]("burnish.weights_of_branches")
"""Of the main graph: the weights that went with branches that are never taken, by name."""
BRANCH_OF = Fact[str]("burnish.branch_of")
"""Of such a weight: which If it was."""


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
        SOURCE.set(node, describe_node(node))


def source_of(node: ir.Node) -> str | None:
    """Return what a node of a program computes a part of, or None where nobody noted it.

    That is a node of the model (``Conv 'stem' (output 'stem_out')``), ``gradient of`` one, ``the loss``, ``the metrics``,
    ``the optimizer`` or ``the random key``.
    """
    return SOURCE.get(node)


def read_mark(node: ir.Node, annotation: Annotation[Said]) -> Said | None:
    """Return what a node says of how it is quantized or pruned, in a model that is perhaps from elsewhere.

    Raises:
        ModelError: the entry is no JSON, or has other fields.
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
        PRUNING.set(node, self)

    @staticmethod
    def of(node: ir.Node) -> PruningMark | None:
        """Return what the metadata of a node says; None where it says nothing."""
        return read_mark(node, PRUNING)


PRUNING = record("burnish.pruning", PruningMark)
"""Of the product of a weight and its mask: how the mask is made."""


def changing_masks(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the masks that training changes; a mean of several is no mask."""
    masks = (node.inputs[1] for node, mark in masked_weights(graph) if mark.changes)
    return frozenset(mask.name or "" for mask in masks if mask is not None)


def masked_weights(graph: ir.Graph) -> Iterator[tuple[ir.Node, PruningMark]]:
    """Give the products of a weight, their first operand, and a mask, their second, with what they say."""
    for node in graph.all_nodes():
        if node.op_type == "Mul" and (mark := PruningMark.of(node)) is not None:
            yield node, mark


NOTHING = "none"
SAMPLE_AXIS = text("burnish.sample_axis")
"""Of an input: which of its axes holds the samples of a batch; ``NOTHING`` if it is the same for all of them."""


def mark_sample_axis(value: ir.Value, axis: int | None) -> None:
    """Note the axis of an input along which samples stand; None: it has no samples, and is the same for all of them."""
    SAMPLE_AXIS.set(value, NOTHING if axis is None else str(axis))


def has_sample_axis_mark(value: ir.Value) -> bool:
    """Whether a graph says which axis of an input holds samples."""
    return SAMPLE_AXIS.is_on(value)


def marked_sample_axis(value: ir.Value) -> int | None:
    """Return the axis that is noted: 0 without a note; None for an input without samples, and one without axes.

    Raises:
        ModelError: the note is no axis of the input.
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
"""Of a node whose file follows PyTorch: which of several subgradients it has at a tie or a bound."""
FIRST = "first"
"""Of extremes along an axis, or of equal operands, the first alone has a gradient; else they share it evenly."""
INCLUSIVE = "inclusive"
"""On a bound the gradient passes, as in ``torch.clamp``; else it does not, as in ``torch.nn.functional.hardtanh``."""

WHOLE = "whole"
"""The gradient passes beyond the bound too, as where PyTorch bounds the lengths of ``cosine_similarity``."""


def subgradient_of(node: ir.Node) -> str | None:
    """Return the subgradient that is noted with a node; None for the operator's own."""
    return SUBGRADIENT.get(node)
