"""Notes of the subgradients that PyTorch has at ties and bounds, for models that come from there.

The standard says nothing of derivatives, and one operator of it stands for several of PyTorch: ReduceMax for ``amax``, whose
ties share a gradient, and for ``max(dim)``, whose first extreme has it all; Clip for ``clamp``, which passes a gradient on its
bounds, and for ``hardtanh``, which does not. The newer exporter notes the call with each node. The older one leaves ArgMax next
to the ReduceMax of ``max(dim)`` while the indices are read, and nothing else.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from burnish.graph import attribute_value, constant_array
from burnish.graph.subgradients import FIRST, INCLUSIVE, SUBGRADIENT, WHOLE
from burnish.graph.uses import origin_of, producer_of
from burnish.importer.export_notes import CALL

_TARGET = re.compile(r"target=torch\.ops\.aten\.(\w+)(?:\.(\w+))?")
_COPIED = re.compile(r"args = \(%clone")
"""``cosine_similarity`` copies the lengths, and bounds the copies without autograd; ``normalize`` bounds the lengths with it."""
_CLAMPS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "clip_"})
_ACTIVATIONS = ((0.0, 6.0), (-1.0, 1.0))
"""Bounds of ReLU6 and of Hardtanh: without a note, these operators are more likely than a clamp."""
_ARGUMENT = {"ReduceMax": "ArgMax", "ReduceMin": "ArgMin"}


def note_subgradients(model: ir.Model) -> None:
    """Note, in place, the subgradients of a model that PyTorch exported; a model from elsewhere stays as it is."""
    if (model.producer_name or "").lower() != "pytorch":
        return
    for node in model.graph.all_nodes():
        if node.domain == "" and SUBGRADIENT not in node.metadata_props and (noted := _subgradient(node)) is not None:
            node.metadata_props[SUBGRADIENT] = noted


def _subgradient(node: ir.Node) -> str | None:
    note = node.metadata_props.get(CALL, "")
    called = _TARGET.search(note)
    name, overload = (called[1], called[2]) if called is not None else (None, None)
    if name == "clamp_min" and node.op_type in ("Clip", "Max") and _COPIED.search(note) and _is_length(node.inputs[0]):
        return WHOLE
    if node.op_type in ("Max", "Min"):
        return FIRST if name in _CLAMPS else None
    if node.op_type == "Clip":
        if name is not None:
            return INCLUSIVE if name in _CLAMPS else None
        return None if _bounds(node) in _ACTIVATIONS else INCLUSIVE
    if node.op_type in _ARGUMENT:
        is_along_one = name in ("max", "min") and overload == "dim"
        return FIRST if is_along_one or (name is None and _has_indices(node)) else None
    return None


def _is_length(value: ir.Value | None) -> bool:
    return value is not None and producer_of(origin_of(value, ("Identity",)), "ReduceL2") is not None


def _bounds(node: ir.Node) -> tuple[float, ...]:
    arrays = (None if value is None else constant_array(value) for value in node.inputs[1:3])
    return tuple(float(array.reshape(())) if array is not None and array.size == 1 else float("nan") for array in arrays)


def _has_indices(node: ir.Node) -> bool:
    """Whether the places of the extremes are asked for, next to the extremes themselves."""
    x, axes = node.inputs[0], constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if x is None or axes is None or axes.size != 1:
        return False
    readers = (reader for reader in x.consumers() if reader.op_type == _ARGUMENT[node.op_type])
    return any(attribute_value(reader, "axis", 0) == int(axes.reshape(())) for reader in readers)
