"""Whether a node means the same in another opset, and moving a model to one where everything does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir

from burnish.graph.inference import operator_version


def _is_set(attribute: str) -> Callable[[ir.Node], bool]:
    return lambda node: attribute in node.attributes and bool(node.attributes[attribute].value)


CHANGED: dict[tuple[str, int], Callable[[ir.Node], bool]] = {
    # Windows that start in the padding behind the data were counted before.
    ("AveragePool", 19): _is_set("ceil_mode"),
    # Scale and bias were per group, and are per channel.
    ("GroupNormalization", 21): lambda node: True,
}
"""Versions that gave the same signature another meaning, and which nodes that concerns."""


def keeps_meaning(node: ir.Node, opset: int, other: int) -> bool:
    """Whether a node of one opset, put into a newer one, is the same: versions between differ by types or by additions.

    An addition is an optional attribute or a trailing optional input. Nodes of other domains are as they are.
    """
    if node.domain not in ("", "ai.onnx"):
        return True
    older = operator_version(node.op_type, opset)
    if older is None:
        return False
    for version in range(opset + 1, other + 1):
        newer = operator_version(node.op_type, version)
        if newer is None:
            return False
        if newer == older:
            continue
        changed = CHANGED.get((node.op_type, newer))
        if (changed is not None and changed(node)) or not _only_adds(node.op_type, opset, version):
            return False
        older = newer
    return True


def raise_opset(model: ir.Model, opset: int) -> bool:
    """Declare at least this opset, in place, if every node keeps its meaning in it; returns whether it is declared."""
    declared = model.opset_imports[""]
    if declared >= opset:
        return True
    if not all(keeps_meaning(node, declared, opset) for node in model.graph.all_nodes()):
        return False
    for graph in model.graphs():
        if graph is model.graph or "" in graph.opset_imports:
            graph.opset_imports[""] = opset
    return True


def _only_adds(op_type: str, opset: int, newer_opset: int) -> bool:
    old, new = (onnx.defs.get_schema(op_type, version, "") for version in (opset, newer_opset))
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    count = len(old.inputs)
    same_inputs = _parameters(new.inputs)[:count] == _parameters(old.inputs)
    if not same_inputs or any(parameter.option != optional for parameter in new.inputs[count:]):
        return False
    if _parameters(new.outputs) != _parameters(old.outputs):
        return False
    defined = {name: _definition(attribute) for name, attribute in new.attributes.items()}
    kept = all(defined.get(name) == _definition(attribute) for name, attribute in old.attributes.items())
    return kept and not any(attribute.required for name, attribute in new.attributes.items() if name not in old.attributes)


def _parameters(parameters: Any) -> list[tuple[str, Any]]:
    return [(parameter.name, parameter.option) for parameter in parameters]


def _definition(attribute: Any) -> tuple[Any, ...]:
    return attribute.type, attribute.required, attribute.default_value.SerializeToString()
