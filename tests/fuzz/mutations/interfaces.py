"""Inputs, outputs and what is declared of values."""

from __future__ import annotations

from random import Random

from onnx import ModelProto, TensorProto, TypeProto, helper

from fuzz.mutations.places import graphs, removed, some_name
from fuzz.mutations.registry import mutation
from fuzz.values import ELEMENT_TYPES, integer


@mutation(4)
def change_type(random: Random, model: ModelProto) -> str | None:
    """The declared element type, shape or kind of an input, output or value in between."""
    graph = random.choice(graphs(model)) if random.random() < 0.4 else model.graph
    values = [*graph.input, *graph.output, *graph.value_info]
    if not values:
        return None
    value = random.choice(values)
    where = f"declared type of {value.name[:40]!r}"
    chance = random.random()
    if chance < 0.1:
        value.ClearField("type")
        return f"{where} goes"
    if chance < 0.25:
        _wrap(random, value.type)
        return f"{where} is a {value.type.WhichOneof('value')}"
    kind = value.type.tensor_type
    if chance < 0.45:
        kind.elem_type = random.choice(ELEMENT_TYPES)
        return f"{where}: elements of type {kind.elem_type}"
    if chance < 0.5:
        kind.ClearField("shape")
        return f"{where}: no shape"
    dims = kind.shape.dim
    if not dims or chance < 0.6:
        dims.add(dim_value=integer(random))
        return f"{where}: one more dimension of {dims[-1].dim_value}"
    index = random.randrange(len(dims))
    if chance < 0.7:
        del dims[index]
        return f"{where}: dimension {index} goes"
    if chance < 0.85:
        dims[index].dim_value = integer(random)
        return f"{where}: dimension {index} is {dims[index].dim_value}"
    if chance < 0.9:
        dims[index].Clear()
        return f"{where}: dimension {index} is unknown"
    dims[index].dim_param = some_name(random, model)
    return f"{where}: dimension {index} is {dims[index].dim_param[:40]!r}"


def _wrap(random: Random, kind: TypeProto) -> None:
    """A tensor becomes a sequence, optional, map or sparse tensor of such."""
    inner = TypeProto.FromString(kind.SerializeToString())
    kind.Clear()
    match random.randrange(4):
        case 0:
            kind.sequence_type.elem_type.CopyFrom(inner)
        case 1:
            kind.optional_type.elem_type.CopyFrom(inner)
        case 2:
            kind.map_type.key_type = random.choice(ELEMENT_TYPES)
            kind.map_type.value_type.CopyFrom(inner)
        case _:
            kind.sparse_tensor_type.elem_type = TensorProto.FLOAT


@mutation(3)
def change_interface(random: Random, model: ModelProto) -> str | None:
    """An input or output of a graph goes, comes twice, changes places or is another value."""
    graph = random.choice(graphs(model)) if random.random() < 0.5 else model.graph
    values = graph.input if random.random() < 0.4 else graph.output
    side = "input" if values is graph.input else "output"
    chance = random.random()
    if not values or chance < 0.25:
        rank = random.randrange(4)
        value = helper.make_tensor_value_info(some_name(random, model), random.choice((1, 7, 9, 11)), [integer(random)] * rank)
        values.append(value)
        return f"one more {side} of {graph.name!r}: {value.name[:40]!r}"
    index = random.randrange(len(values))
    if chance < 0.5:
        return f"{side} {removed(values, index).name[:40]!r} of {graph.name!r} goes"
    if chance < 0.65:
        values.add().CopyFrom(values[index])
        return f"{side} {index} of {graph.name!r} comes twice"
    if chance < 0.75:
        other = graph.output if values is graph.input else graph.input
        other.add().CopyFrom(values[index])
        return f"{side} {index} of {graph.name!r} is on the other side too"
    values[index].name = some_name(random, model)
    return f"{side} {index} of {graph.name!r} is {values[index].name[:40]!r}"


@mutation(2)
def add_value_info(random: Random, model: ModelProto) -> str | None:
    graph = random.choice(graphs(model))
    kind = random.choice(ELEMENT_TYPES)
    value = graph.value_info.add(name=some_name(random, model))
    value.type.tensor_type.elem_type = kind
    if random.random() < 0.7:
        for _ in range(random.randrange(4)):
            value.type.tensor_type.shape.dim.add(dim_value=integer(random))
    return f"value_info says that {value.name[:40]!r} is of type {kind}"
