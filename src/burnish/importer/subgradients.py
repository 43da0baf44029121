"""Notes of the subgradients that PyTorch has at ties and bounds, for models that come from there.

The standard says nothing of derivatives, and one operator of it stands for several of PyTorch: ReduceMax for ``amax``, whose
ties share a gradient, and for ``max(dim)``, whose first extreme has it all; Clip for ``clamp``, which passes a gradient on its
bounds, and for ``hardtanh``, which does not. The newer exporter notes the call with each node. In a file of the older one, which
notes nothing, the call that is more likely counts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import onnx_ir as ir

from burnish.graph import constant_array
from burnish.graph.annotations import FIRST, INCLUSIVE, SUBGRADIENT, WHOLE
from burnish.graph.uses import only_user, origin_of, producer_of
from burnish.importer.export_notes import CALL

_TARGET = re.compile(r"target=torch\.ops\.aten\.(\w+)(?:\.(\w+))?")
_COPIED = re.compile(r"args = \(%clone")
"""``cosine_similarity`` copies the lengths, and bounds the copies without autograd; ``normalize`` bounds the lengths with it."""
_CLAMPS = frozenset({"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "clip_"})
_RELU6 = (0.0, 6.0)
"""Without a note, this activation is more likely than a clamp with its bounds."""


def note_subgradients(model: ir.Model) -> None:
    """Note, in place, the subgradients of a model that PyTorch exported; a model from elsewhere stays as it is."""
    if (model.producer_name or "").lower() != "pytorch":
        return
    nodes = [node for node in model.graph.all_nodes() if node.domain == ""]
    are_noted = any(CALL in node.metadata_props for node in nodes)
    modules: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        modules[_module_of(node)].update({node.op_type} - {"Constant"})
    for node in nodes:
        if SUBGRADIENT not in node.metadata_props:
            subgradient = _subgradient_of_call(node) if are_noted else _likely_subgradient(node, modules)
            if subgradient is not None:
                node.metadata_props[SUBGRADIENT] = subgradient


def _subgradient_of_call(node: ir.Node) -> str | None:
    note = node.metadata_props.get(CALL, "")
    called = _TARGET.search(note)
    name, overload = (called[1], called[2]) if called is not None else (None, None)
    if name == "clamp_min" and node.op_type in ("Clip", "Max") and _COPIED.search(note) and _is_length(node.inputs[0]):
        return WHOLE
    if node.op_type in ("Max", "Min"):
        return FIRST if name in _CLAMPS else None
    if node.op_type == "Clip":
        return INCLUSIVE if name in _CLAMPS or (name is None and _bounds(node) not in (_RELU6, (-1.0, 1.0))) else None
    if node.op_type in ("ReduceMax", "ReduceMin"):
        return FIRST if name in ("max", "min") and overload == "dim" else None
    return None


def _likely_subgradient(node: ir.Node, modules: Mapping[str, set[str]]) -> str | None:
    """The subgradient of what PyTorch most likely called, where no node notes its call."""
    if node.op_type in ("Max", "Min"):  # The minimum of a maximum is how clamp is written where the bounds are tensors.
        inner, outer = (
            (node, only_user(node.outputs[0], "Min")) if node.op_type == "Max" else (producer_of(node.inputs[0], "Max"), node)
        )
        return FIRST if inner is not None and outer is not None and outer.inputs[0] is inner.outputs[0] else None
    if node.op_type == "Clip":
        is_activation = _bounds(node) == _RELU6 or (_module_of(node) != "" and modules[_module_of(node)] == {"Clip"})
        return None if is_activation else INCLUSIVE
    if node.op_type in ("ReduceMax", "ReduceMin"):
        axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
        is_norm = producer_of(node.inputs[0], "Abs") is not None
        return FIRST if axes is not None and axes.size == 1 and not is_norm else None
    return None


def _is_length(value: ir.Value | None) -> bool:
    return value is not None and producer_of(origin_of(value, ("Identity",)), "ReduceL2") is not None


def _bounds(node: ir.Node) -> tuple[float, ...]:
    arrays = (None if value is None else constant_array(value) for value in node.inputs[1:3])
    return tuple(float(array.reshape(())) if array is not None and array.size == 1 else float("nan") for array in arrays)


def _module_of(node: ir.Node) -> str:
    """The module that a node's name begins with: ``/features/2`` of ``/features/2/Clip``."""
    return (node.name or "").rpartition("/")[0]
