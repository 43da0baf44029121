"""External data, bodies, and any field whatsoever."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from fuzz.mutations.places import node_lists, tensors_of
from fuzz.mutations.registry import mutation
from fuzz.values import NAMES, float32, integer


@mutation(2)
def change_external_data(random: Random, model: ModelProto) -> str | None:
    tensors = [tensor for tensor in tensors_of(model) if tensor.external_data or tensor.data_location == TensorProto.EXTERNAL]
    if not tensors:
        return None
    tensor = random.choice(tensors)
    keys = ("location", "offset", "length", "checksum", "basepath")
    entry = (
        random.choice(tensor.external_data)
        if tensor.external_data and random.random() < 0.8
        else tensor.external_data.add(key=random.choice(keys))
    )
    places = (
        "",
        ".",
        "..",
        "/dev/zero",
        "weights.bin",
        "model.onnx",
        "link.bin",
        "hard.bin",
        "pipe",
        "sub",
        "sub/../weights.bin",
        "./weights.bin",
        "nowhere",
        "a" * 300,
        "\0",
    )
    numbers = (*(str(integer(random)) for _ in range(3)), "4", "8", "16", "", "x", "1e3", " 4 ", "0x10", "9" * 400, "٤")
    entry.value = random.choice(places) if entry.key == "location" else random.choice(numbers)
    return f"external data of {tensor.name[:40]!r}: {entry.key} is {entry.value[:40]!r}"


@mutation(2)
def change_body(random: Random, model: ModelProto) -> str | None:
    """A body goes to another node, or stands inside itself."""
    holders = [
        attribute for nodes in node_lists(model) for node in nodes for attribute in node.attribute if attribute.HasField("g")
    ]
    if not holders:
        return None
    holder = random.choice(holders)
    if random.random() < 0.5:
        other = GraphProto.FromString(random.choice(holders).g.SerializeToString())
        holder.g.CopyFrom(other)
        return f"body {holder.g.name!r} is put in another place"
    inner = random.choice([node for nodes in node_lists(model) for node in nodes if any(a.HasField("g") for a in node.attribute)])
    copy = NodeProto.FromString(inner.SerializeToString())
    holder.g.node.insert(random.randrange(len(holder.g.node) + 1), copy)
    return f"a {inner.op_type} stands in the body {holder.g.name!r}"


@mutation(3)
def change_any_field(random: Random, model: ModelProto) -> str | None:
    """A field somewhere is cleared, filled or changed, whatever it is."""
    message: Any = model
    path = "model"
    while True:
        fields = message.DESCRIPTOR.fields
        present = [descriptor for descriptor, _ in message.ListFields()]
        descriptor = random.choice(present) if present and random.random() < 0.9 else random.choice(fields)
        path += f".{descriptor.name}"
        value = getattr(message, descriptor.name)
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE and random.random() < 0.9:
            if not descriptor.is_repeated:
                message = value
                continue
            if value:
                message = random.choice(value)
                continue
        return f"{path}: {_changed_field(random, message, descriptor)}"


def _changed_field(random: Random, message: Any, descriptor: Any) -> str:
    value = getattr(message, descriptor.name)
    if random.random() < 0.3:
        message.ClearField(descriptor.name)
        return "cleared"
    if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        if descriptor.is_repeated:
            value.add()
        else:
            value.SetInParent()
        return "an empty message"
    drawn = _drawn(random, descriptor)
    if not descriptor.is_repeated:
        setattr(message, descriptor.name, drawn)
    elif value and random.random() < 0.6:
        value[random.randrange(len(value))] = drawn
    else:
        value.append(drawn)
    return f"{drawn!r}"[:60]


def _drawn(random: Random, descriptor: Any) -> Any:
    match descriptor.type:
        case FieldDescriptor.TYPE_STRING:
            return random.choice(NAMES)
        case FieldDescriptor.TYPE_BYTES:
            return random.choice((b"", b"\0", b"\xff" * 9, random.randbytes(16)))
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return float32(random)
        case FieldDescriptor.TYPE_UINT64:
            return abs(integer(random))
        case FieldDescriptor.TYPE_INT64:
            return integer(random)
        case FieldDescriptor.TYPE_ENUM:
            return random.choice([value.number for value in descriptor.enum_type.values])
    return max(-(1 << 31), min(integer(random), (1 << 31) - 1))
