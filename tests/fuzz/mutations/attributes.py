"""Attributes of other values, kinds and names, or gone."""

from __future__ import annotations

from random import Random
from typing import Any

import onnx
from onnx import AttributeProto, ModelProto, helper

from fuzz.mutations.payloads import changed_tensor
from fuzz.mutations.places import changed_list, some_node
from fuzz.mutations.registry import mutation
from fuzz.values import NAMES, float32, integer


@mutation(6)
def change_attribute(random: Random, model: ModelProto) -> str | None:
    """Another value of the same kind."""
    node = some_node(random, model)
    if node is None or not node.attribute:
        return None
    attribute = random.choice(node.attribute)
    where = f"attribute {attribute.name} of {node.op_type}"
    match attribute.type:
        case AttributeProto.INT:
            attribute.i = integer(random)
            return f"{where} is {attribute.i}"
        case AttributeProto.FLOAT:
            attribute.f = float32(random)
            return f"{where} is {attribute.f}"
        case AttributeProto.STRING:
            attribute.s = random.choice(
                (b"", b"\xff\xfe", b"SAME_LOWER", b"constant", b"bidirectional", b"bi,ij->bj", b"i" * 300, b"...,->")
            )
            return f"{where} is {attribute.s[:40]!r}"
        case AttributeProto.INTS:
            return changed_list(random, attribute.ints, integer, where)
        case AttributeProto.FLOATS:
            return changed_list(random, attribute.floats, float32, where)
        case AttributeProto.TENSOR:
            return f"{where}: {changed_tensor(random, attribute.t)}"
    return None


@mutation(3)
def reshape_attributes(random: Random, model: ModelProto) -> str | None:
    """An attribute goes, comes twice, has another name or kind, refers to a function's, or is one that was not there."""
    node = some_node(random, model)
    if node is None:
        return None
    chance = random.random()
    if not node.attribute or chance < 0.3:
        schema = (
            onnx.defs.get_schema(node.op_type, domain=node.domain) if onnx.defs.has(node.op_type, domain=node.domain) else None
        )
        names = sorted(schema.attributes) if schema is not None and schema.attributes else list(NAMES)
        value: Any = random.choice((integer(random), float32(random), "text", [integer(random)], [float32(random)], []))
        attribute = node.attribute.add()
        kind = AttributeProto.INTS if value == [] else None
        attribute.CopyFrom(helper.make_attribute(random.choice(names), value, attr_type=kind))
        return f"{node.op_type} gets attribute {attribute.name[:40]!r} of {value!r}"
    index = random.randrange(len(node.attribute))
    attribute = node.attribute[index]
    where = f"attribute {attribute.name[:40]!r} of {node.op_type}"
    if chance < 0.5:
        del node.attribute[index]
        return f"{where} goes"
    if chance < 0.6:
        node.attribute.add().CopyFrom(attribute)
        return f"{where} comes twice"
    if chance < 0.75:
        attribute.type = random.choice(AttributeProto.AttributeType.values())
        return f"{where} is of type {attribute.type}"
    if chance < 0.85:
        attribute.name = random.choice(NAMES)
        return f"{where} is called {attribute.name[:40]!r}"
    attribute.ref_attr_name = random.choice(("slope", "alpha", *NAMES))
    return f"{where} refers to {attribute.ref_attr_name[:40]!r}"
