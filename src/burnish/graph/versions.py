"""Moving nodes and models to other opsets if their meaning stays the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from burnish.graph.inference import operator_version
from burnish.graph.shapes import FLOATING


def _has(attribute: str, value: Any) -> Callable[[ir.Node], bool]:
    return lambda node: attribute in node.attributes and bool(node.attributes[attribute].value == value)


WITHOUT_INFINITY = (ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2FNUZ)

CHANGED: dict[tuple[str, int], Callable[[ir.Node], bool]] = {
    # Windows that start in the padding after the data counted before.
    ("AveragePool", 19): _has("ceil_mode", 1),
    # Scale and bias were per group, now per channel.
    ("GroupNormalization", 21): lambda node: True,
    # Infinities became the largest number instead of NaN.
    ("Cast", 24): lambda node: node.attributes["to"].as_int() in WITHOUT_INFINITY,
    # fmod=0 now allows floating-point operands, as a floored quotient.
    ("Mod", 28): lambda node: (
        node.inputs[0] is not None
        and node.inputs[0].dtype in FLOATING
        and not ("fmod" in node.attributes and node.attributes["fmod"].value)
    ),
    # New modes.
    ("Pad", 19): _has("mode", "wrap"),
    ("Resize", 19): _has("coordinate_transformation_mode", "half_pixel_symmetric"),
}
"""Operator versions with the same signature but a new meaning, and a test for affected nodes."""


def keeps_meaning(node: ir.Node, opset: int, newer: int) -> bool:
    """True if a node means the same in two opsets: its operator's versions differ only in types or additions.

    An addition is an optional attribute or trailing optional input. Nodes of other domains never change.
    """
    if node.domain != "":
        return True
    version = _version(node.op_type, opset)
    if version is None:
        return False
    for following in range(opset + 1, newer + 1):
        if _version(node.op_type, following) != following:
            continue
        changes = CHANGED.get((node.op_type, following))
        if (changes is not None and changes(node)) or not _only_adds(node.op_type, version, following):
            return False
        version = following
    return True


def raise_opset(graph: ir.Graph, opset: int) -> bool:
    """Declare at least this opset, in place, if every node keeps its meaning; return True if it is declared."""
    declared = graph.opset_imports[""]
    if declared >= opset:
        return True
    if not all(keeps_meaning(node, declared, opset) for node in graph.all_nodes()):
        return False
    for inner in (graph, *graph.subgraphs()):
        if inner is graph or "" in inner.opset_imports:
            inner.opset_imports[""] = opset
    return True


def oldest_opset(node: ir.Node, opset: int, oldest: int) -> int:
    """Return the oldest opset, from ``oldest`` on, in which a standard node of this opset is valid and means the same."""
    version = _version(node.op_type, opset)
    while version is not None and version > oldest:
        older = _version(node.op_type, version - 1)
        if older is None or not keeps_meaning(node, version - 1, version) or not _is_valid(node, older):
            return version
        version = older
    return oldest if version is not None else opset


@cache
def _version(op_type: str, opset: int) -> int | None:
    return operator_version(op_type, opset)


@cache
def _only_adds(op_type: str, older: int, newer: int) -> bool:
    old, new = (onnx.defs.get_schema(op_type, version, "") for version in (older, newer))
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


def _is_valid(node: ir.Node, version: int) -> bool:
    schema, inputs, outputs = _signature(node.op_type, version)
    if len(node.inputs) > schema.max_input or not set(node.attributes) <= set(schema.attributes):
        return False
    return _are_allowed(node.inputs, inputs) and _are_allowed(node.outputs, outputs)


def _are_allowed(values: Any, allowed: tuple[frozenset[str], ...]) -> bool:
    for index, value in enumerate(values):
        if value is None or not (value.uses() or value.is_graph_output()):
            continue
        if not allowed or not isinstance(value.type, ir.TensorType):
            return False
        if f"tensor({value.dtype.name.lower()})" not in allowed[min(index, len(allowed) - 1)]:
            return False
    return True


@cache
def _signature(op_type: str, version: int) -> tuple[Any, tuple[frozenset[str], ...], tuple[frozenset[str], ...]]:
    """Return the schema and the types allowed for each input and output; the last entry covers variadic ones."""
    schema = onnx.defs.get_schema(op_type, version, "")
    allowed = {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints}

    def types(parameters: Any) -> tuple[frozenset[str], ...]:
        return tuple(allowed.get(parameter.type_str, frozenset({parameter.type_str})) for parameter in parameters)

    return schema, types(schema.inputs), types(schema.outputs)
