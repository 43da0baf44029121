"""Column coding as part of an exported model, which then takes raw columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish.data.model_metadata import DataDescription
from burnish.data.table_coding import TableDescription
from burnish.graph import FLOATING, Builder, Names, Tensor
from burnish.graph.annotations import COLUMNS
from burnish.importer import read_proto

CLASSICAL_DOMAIN, CLASSICAL_VERSION = "ai.onnx.ml", 3
"""Domain of LabelEncoder."""


def put_columns(model: ir.Model) -> str | None:
    """Prepend the column coding in a model's metadata (categories, scales, missing values), in place.

    A single input of only numeric columns stays, for raw numbers [batch, columns]; NaN and infinities are missing. With text
    columns it becomes one input per column, by name: text or floats, [batch, 1]; empty text is missing. Inputs of one column each
    keep their names. New categories are all zeros if one-hot, else index -1, or the spare row of an input that selects rows.

    Args:
        model: an exported model with the inputs of training.

    Returns:
        The reason why inputs are unchanged, if a column has the name of an output; else None.
    """
    table = DataDescription.read(model.metadata_props).table
    if table is None or table.in_model:
        return None
    graph, names = model.graph, [name for name, _ in table.columns]
    inputs = {value.name or "": value for value in graph.inputs}
    is_single = len(inputs) == 1
    has_texts = any(categories is not None for _, categories in table.columns)
    if is_single and has_texts:
        taken = {output.name for output in graph.outputs} & {*names}
        if taken:
            return (
                f"the file takes coded numbers and no raw columns, as its output and the column '{min(map(str, taken))}' have "
                "one name: rename the column"
            )
        _of_columns(model, graph.inputs[0], table)
    elif is_single:
        _of_numbers(graph, graph.inputs[0], table)
    else:
        for name, categories in table.columns:
            if name in inputs:
                _of_one(model, inputs[name], name, categories, table)
    _describe(model, table)
    return None


def fed_by(path: str | Path) -> str | None:
    """Return a description of the raw columns that an exported file takes and how to feed them; None if it takes none."""
    proto = read_proto(path)[0]
    table = DataDescription.read({entry.key: entry.value for entry in proto.metadata_props}, str(path)).table
    if table is None or not table.in_model:
        return None
    held = {entry.name for entry in proto.graph.initializer}
    inputs = [value.name for value in proto.graph.input if value.name not in held]
    if len(inputs) == 1 and not any(categories is not None for _, categories in table.columns):
        order = ", ".join(column for column, _ in table.columns)
        return f"takes raw columns: '{inputs[0]}', one row for each sample, in the order {order}" + (
            "; NaN where a value is missing" if table.fills else ""
        )
    fed = [
        f'"{name}": np.array([["{categories[0]}"]])'
        if (categories := dict(table.columns).get(name))
        else f'"{name}": np.array([[1.5]], np.float32)'
        for name in inputs
    ]
    shown = ", ".join(fed[:SHOWN]) + (", ..." if len(fed) > SHOWN else "")
    return f"takes raw columns, one input for each, [batch, 1]: session.run(None, {{{shown}}})"


SHOWN = 3


def _describe(model: ir.Model, table: TableDescription) -> None:
    COLUMNS.set(model, TableDescription(table.columns, table.one_hot, table.scales, table.fills, in_model=True).options())


def _raw(old: ir.Value, name: str, dtype: ir.DataType, shape: ir.Shape) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
    value.metadata_props.update(old.metadata_props)
    return value


def _replace(graph: ir.Graph, old: ir.Value, new: Sequence[ir.Value], result: Tensor) -> None:
    builder, (dtype, shape) = result.builder, (old.dtype, old.shape)
    assert dtype is not None
    made = builder.cast(result, dtype).value
    place = [*graph.inputs].index(old)
    old.replace_all_uses_with(made)
    made.shape = shape
    graph.inputs.remove(old)
    for offset, value in enumerate(new):
        graph.inputs.insert(place + offset, value)


def _builder(graph: ir.Graph) -> Builder:
    return Builder(graph, before=next(iter(graph), None))


def _raw_type(value: ir.Value) -> ir.DataType:
    return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _of_numbers(graph: ir.Graph, old: ir.Value, table: TableDescription) -> None:
    if old.dtype not in FLOATING or old.shape is None:
        return
    builder, name = _builder(graph), old.name or ""
    old.name = f"{name}:standardized"
    raw = _raw(old, name, _raw_type(old), old.shape)
    numbers = builder.tensor(raw)
    extents = [extent if isinstance(extent, int) else -1 for extent in old.shape.dims[1:]]
    dtype = _raw_type(old).numpy()

    def constant(values: Sequence[float]) -> Tensor:
        return builder.constant(np.asarray(values, dtype).reshape(extents))

    if table.fills:
        filled = constant([0.0 if value is None else float(value) for value in table.fills])
        numbers = _filled(numbers, filled, [value is not None for value in table.fills], extents)
    if table.scales:
        numbers = numbers - constant([0.0 if scale is None else scale.mean for scale in table.scales])
        numbers = numbers * constant([1.0 if scale is None else scale.factor for scale in table.scales])
    _replace(graph, old, [raw], numbers)


def _filled(numbers: Tensor, filled: Tensor, has_fill: Sequence[bool], extents: Sequence[int]) -> Tensor:
    builder = numbers.builder
    missing = builder.op("Or", builder.op("IsNaN", numbers), builder.op("IsInf", numbers))
    if not all(has_fill):
        missing = builder.op("And", missing, builder.constant(np.asarray(has_fill).reshape(extents)))
    return builder.op("Where", missing, filled, numbers, like=numbers)


def _of_columns(model: ir.Model, old: ir.Value, table: TableDescription) -> None:
    graph = model.graph
    _free(graph, {name for name, _ in table.columns})
    builder, taken = _builder(graph), Names.of(graph)
    old.name = taken.take(f"{old.name}:coded")
    assert old.shape is not None
    raws, parts = [], []
    for name, categories in table.columns:
        raw = _raw(old, name, ir.DataType.STRING if categories is not None else _raw_type(old), ir.Shape([old.shape[0], 1]))
        raws.append(raw)
        parts.append(_coded(model, builder, raw, categories, table, _raw_type(old), table.one_hot, -1))
    joined = builder.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
    if len(old.shape) != 2:
        extents = [extent if isinstance(extent, int) else -1 for extent in old.shape.dims[1:]]
        joined = builder.op("Reshape", joined, builder.integers([0, *extents]))
    _replace(graph, old, raws, joined)


def _of_one(model: ir.Model, old: ir.Value, name: str, categories: Sequence[str] | None, table: TableDescription) -> None:
    if old.dtype == ir.DataType.STRING or old.shape is None or old.dtype is None:
        return
    is_floating = old.dtype in FLOATING
    if categories is None and (not is_floating or (table.scale(name) is None and table.fill(name) is None)):
        return
    graph, width = model.graph, old.shape[-1] if len(old.shape) > 1 else 1
    is_place = categories is not None and is_floating and len(categories) > 1 and width == len(categories)
    builder = _builder(graph)
    old.name = Names.of(graph).take(f"{name}:coded")
    shape = ir.Shape([old.shape[0], 1]) if is_place else old.shape
    raw = _raw(old, name, ir.DataType.STRING if categories is not None else _raw_type(old), shape)
    # The spare row comes after the last category; if there is none, the lookup fails.
    unseen = -1 if is_floating or categories is None else len(categories)
    coded = _coded(model, builder, raw, categories, table, _raw_type(old), is_place, unseen, is_floating)
    _replace(graph, old, [raw], coded)


def _coded(
    model: ir.Model,
    builder: Builder,
    raw: ir.Value,
    categories: Sequence[str] | None,
    table: TableDescription,
    dtype: ir.DataType,
    is_place: bool,
    unseen: int,
    is_floating: bool = True,
) -> Tensor:
    name, numbers = raw.name or "", builder.tensor(raw)
    fill, scale = table.fill(name), table.scale(name)
    if categories is None:
        if fill is not None:
            numbers = _filled(numbers, builder.scalar(float(fill), dtype), [True], [])
    else:
        index = _looked_up(model, builder, raw, categories, fill if isinstance(fill, str) else None, unseen)
        if not is_floating:
            return index
        if is_place:
            index = builder.op("Equal", index, builder.constant(np.arange(len(categories), dtype=np.int64)[None]))
        numbers = builder.cast(index, dtype)
    if scale is not None:
        numbers = (numbers - builder.scalar(scale.mean, dtype)) * builder.scalar(scale.factor, dtype)
    return numbers


def _looked_up(
    model: ir.Model, builder: Builder, raw: ir.Value, categories: Sequence[str], fill: str | None, unseen: int
) -> Tensor:
    """Emit the index of each text among the categories, int64 in the texts' shape; an empty text is missing."""
    keys, places = [*categories], [*range(len(categories))]
    if fill is not None and "" not in keys:
        keys, places = [*keys, ""], [*places, keys.index(fill)]
    attributes = {
        "keys_strings": ir.AttrStrings("keys_strings", keys),
        "values_int64s": ir.AttrInt64s("values_int64s", places),
        "default_int64": ir.AttrInt64("default_int64", unseen),
    }
    node = ir.Node(CLASSICAL_DOMAIN, "LabelEncoder", [raw], attributes=[*attributes.values()], num_outputs=1)
    output = node.outputs[0]
    output.type, output.shape = ir.TensorType(ir.DataType.INT64), raw.shape
    output.name = Names.of(model.graph).take(f"{raw.name}:index")
    if builder.before is None:
        model.graph.append(node)
    else:
        model.graph.insert_before(builder.before, node)
    model.graph.opset_imports.setdefault(CLASSICAL_DOMAIN, CLASSICAL_VERSION)
    return builder.tensor(output)


def _free(graph: ir.Graph, names: set[str]) -> None:
    taken = Names.of(graph)
    values = [*graph.inputs, *graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs)]
    for value in values:
        if value.name in names:
            value.name = taken.take(f"{value.name}:value")
