"""Replacement of loops over embedding bags, as written by PyTorch's exporters.

``EmbeddingBag`` sums or averages the table rows of each bag. Both exporters write a Loop that slices out the rows of one bag
after another: the older one collects the results as the loop's scan output, the newer one in a sequence. A scatter-add of the
rows gives the same result and passes gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, remove_node, replace_node
from burnish.graph.uses import is_used, only_user, origin_of, producer_of
from burnish.operators.positions import scatter_add

_INDEX = ir.DataType.INT64
_PASSED = frozenset({"Identity", "Cast", "CastLike"})
_RESHAPED = frozenset({"Reshape", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True)
class _Rows:
    """The rows to reduce: a value's, or those of ``table`` at ``indices``, times ``factors`` if any."""

    value: ir.Value | None = None
    table: ir.Value | None = None
    indices: ir.Value | None = None
    factors: ir.Value | None = None

    def write(self, builder: Builder) -> Tensor:
        if self.value is not None:
            return builder.tensor(self.value)
        assert self.table is not None
        assert self.indices is not None
        rows = builder.op("Gather", builder.tensor(self.table), builder.tensor(self.indices), axis=0)
        if self.factors is None:
            return rows
        return rows * builder.op("Unsqueeze", builder.tensor(self.factors), builder.integers([1]))


@dataclass(frozen=True)
class _Bag:
    """The computation of an iteration: a reduction of the rows between two ``offsets``."""

    rows: _Rows
    offsets: ir.Value
    mean: bool
    keeps_axis: bool
    dtype: ir.DataType | None

    def is_sound(self, graph: ir.Graph) -> bool:
        """True if its inputs come from the graph around the loop, the rows have one axis, and their dtype does not change."""
        vectors = [value for value in (self.offsets, self.rows.indices, self.rows.factors) if value is not None]
        matrix = self.rows.value if self.rows.value is not None else self.rows.table
        if matrix is None or matrix.graph is not graph or _rank(matrix) != 2 or matrix.dtype != self.dtype:
            return False
        return all(value.graph is graph and _rank(value) == 1 for value in vectors)


def replace_embedding_bags(model: ir.Model) -> bool:
    """Replace, in place, every Loop over embedding bags in the main graph (sums and means); return True if there were any.

    The mean of no rows is 0, as in PyTorch. Loops of other forms stay.
    """
    replaced = False
    for node in list(model.graph):
        if node.op_type == "Loop" and node.domain == "":
            replaced |= _replace_scan_output(node) or _replace_sequence(node)
    return replaced


def _replace_scan_output(loop: ir.Node) -> bool:
    """Replace a loop with one row per iteration: ``Loop(count, true) -> rows``."""
    body = loop.attributes["body"].as_graph()
    if len(loop.inputs) != 2 or len(loop.outputs) != 1 or len(body.outputs) != 2:
        return False
    if not _is_true(loop.inputs[1]) or not _is_true(body.outputs[0]):
        return False
    bag = _bag(body.outputs[1], body.inputs[0])
    if bag is None or bag.keeps_axis or not _counts_bags(loop.inputs[0], bag.offsets) or not _fits(loop, loop, bag):
        return False
    _write(loop, bag)
    return True


def _replace_sequence(loop: ir.Node) -> bool:
    """Replace a loop that counts itself and inserts rows: ``Loop("", more, [], 0) -> sequence, count`` and a concatenation.

    The exporter writes the two states in any order.
    """
    body = loop.attributes["body"].as_graph()
    if len(loop.inputs) != 4 or len(loop.outputs) != 2 or len(body.outputs) != 3 or loop.inputs[0] is not None:
        return False
    carried = list(zip(loop.inputs[2:], body.inputs[2:], body.outputs[1:], loop.outputs, strict=True))
    if _producer(carried[0][0], "SequenceEmpty") is None:
        carried.reverse()
    (empty, before, after, sequence), (start, index, next_index, count) = carried
    made, inserted, more = (
        _producer(empty, "SequenceEmpty"),
        _producer(after, "SequenceInsert"),
        _producer(body.outputs[0], "Less"),
    )
    joined = only_user(sequence, "ConcatFromSequence")
    if made is None or inserted is None or more is None or inserted.inputs[0] is not before or len(inserted.inputs) > 2:
        return False
    if joined is None or is_used(count) or attribute_value(joined, "axis", 0) or attribute_value(joined, "new_axis", 0):
        return False
    bag = _bag(inserted.inputs[1], index)
    if bag is None or not bag.keeps_axis or _number(start) != 0 or _position(next_index, index) != 1:
        return False
    if _position(more.inputs[0], index) != 1 or not _counts_bags(more.inputs[1], bag.offsets) or not _fits(joined, loop, bag):
        return False
    _write(joined, bag)
    graph = loop.graph
    assert graph is not None
    remove_node(loop)
    if not made.outputs[0].uses():
        remove_node(made)
    return True


def _fits(node: ir.Node, loop: ir.Node, bag: _Bag) -> bool:
    return isinstance(loop.graph, ir.Graph) and bag.is_sound(loop.graph) and node.outputs[0].dtype in (None, bag.dtype)


def _write(node: ir.Node, bag: _Bag) -> None:
    """Replace a node's output by the results of all bags, [bags, width]."""
    assert isinstance(node.graph, ir.Graph)
    builder = Builder(node.graph, before=node)
    rows, offsets = bag.rows.write(builder), builder.cast(builder.tensor(bag.offsets), _INDEX)
    one, first, last = (builder.integers([number]) for number in (1, 0, -1))
    count = builder.op("Shape", rows, start=0, end=1)
    # A row belongs to the last bag that starts at or before it. Rows after the last offset form another bag, which is dropped.
    starts = builder.op("ConstantOfShape", count + one, value=ir.tensor(np.zeros(1, np.int64)), dtype=_INDEX)
    ones = builder.op("Expand", one, builder.op("Shape", offsets))
    places = builder.op("CumSum", scatter_add(starts, offsets, ones, axis=0), builder.scalar(0, _INDEX)) - 1
    places = builder.op("Slice", places, first, last, first)
    width = builder.op("Shape", rows, start=1, end=2)
    empty = builder.op("Concat", builder.op("Shape", offsets), width, axis=0)
    zeros = builder.op("ConstantOfShape", empty, value=ir.tensor(np.zeros(1, rows.dtype.numpy())), dtype=rows.dtype)
    places = builder.op("Expand", builder.op("Unsqueeze", places, one), builder.op("Shape", rows))
    total = builder.op("Slice", scatter_add(zeros, places, rows, axis=0), first, last, first)
    if bag.mean:
        ends = builder.op("Slice", offsets, one, builder.integers([np.iinfo(np.int64).max]), first)
        sizes = builder.op("Max", ends - builder.op("Slice", offsets, first, last, first), one)
        total = total / builder.op("Unsqueeze", builder.cast(sizes, rows.dtype), one)
    replace_node(node, total)


def _bag(value: ir.Value | None, index: ir.Value) -> _Bag | None:
    node = _producer(value)
    if node is None:
        return None
    match node.op_type:
        case "ReduceSum" | "ReduceMean":
            cut = _rows(node.inputs[0], index)
            if cut is None or _axes(node) != [0]:
                return None
            rows, offsets = cut
            keeps_axis = attribute_value(node, "keepdims", 1) != 0
            return _Bag(rows, offsets, node.op_type == "ReduceMean", keeps_axis, node.outputs[0].dtype)
        case "If":
            return _decided(node, index)
        case "Div":
            bag, size = _bag(node.inputs[0], index), _producer(node.inputs[1], "Sub")
            # mean of the last bag: the exporter divides by the number of rows from its start on
            if bag is None or bag.mean or size is None or _element(size.inputs[1], index) != (bag.offsets, 0):
                return None
            return replace(bag, mean=True)
    return None


def _decided(node: ir.Node, index: ir.Value) -> _Bag | None:
    branches = [node.attributes[name].as_graph().outputs[0] for name in ("then_branch", "else_branch")]
    condition = _producer(node.inputs[0])
    if condition is not None and len(condition.inputs) == 2:
        numbers = [_number(value) for value in condition.inputs]
        compared = [_element(value, index) for value in condition.inputs]
        if condition.op_type == "Equal" and None not in numbers:
            return _bag(branches[0] if numbers[0] == numbers[1] else branches[1], index)
        if condition.op_type == "Equal" and _is_start_and_end(compared):
            return _bag(branches[1], index) if _is_zero(branches[0]) else None
        size = _producer(condition.inputs[0], "Sub")
        if condition.op_type == "Greater" and numbers[1] == 0 and size is not None:
            bag = _bag(branches[0], index)
            return bag if bag is not None and _element(size.inputs[1], index) == (bag.offsets, 0) else None
    one, other = (_bag(branch, index) for branch in branches)
    return one if one == other else None


def _rows(value: ir.Value | None, index: ir.Value) -> tuple[_Rows, ir.Value] | None:
    if (cut := _cut(value, index)) is not None:
        return _Rows(value=cut[0]), cut[1]
    factors = None
    if (product := _producer(value, "Mul")) is not None:
        column = _producer(product.inputs[1], "Unsqueeze")
        if column is None or _axes(column) != [1] or (factors := _cut(column.inputs[0], index)) is None:
            return None
        value = product.inputs[0]
    gather = _producer(value, "Gather")
    indices = None if gather is None or attribute_value(gather, "axis", 0) else _cut(gather.inputs[1], index)
    if gather is None or indices is None or (factors is not None and factors[1] is not indices[1]):
        return None
    return _Rows(table=gather.inputs[0], indices=indices[0], factors=factors and factors[0]), indices[1]


def _cut(value: ir.Value | None, index: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the source of a slice between consecutive offsets, and the offsets: one more than there are bags."""
    node = _producer(value, "Slice")
    if node is None or node.inputs[0] is None or _axes(node, 3) not in (None, [0]) or _axes(node, 4) not in (None, [1]):
        return None
    start, end = (_element(bound, index) for bound in node.inputs[1:3])
    if start is None or end is None or start[1] != 0:
        return None
    if end == (start[0], 1) or (end[1] == 0 and _is_rest(end[0], start[0])):
        return node.inputs[0], start[0]
    return None


def _element(value: ir.Value | None, index: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the vector that a value is an element of, and its position relative to ``index``."""
    node = _producer(value)
    if node is None or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in _RESHAPED:
        return _element(node.inputs[0], index)
    if node.op_type == "Gather" and not attribute_value(node, "axis", 0):
        place = _position(node.inputs[1], index)
        return None if place is None else (node.inputs[0], place)
    if node.op_type == "Slice":
        first, behind = (_position(bound, index) for bound in node.inputs[1:3])
        return (node.inputs[0], first) if first is not None and behind == first + 1 else None
    return None


def _position(value: ir.Value | None, index: ir.Value) -> int | None:
    while value is not None and value is not index:
        node = value.producer()
        if node is None:
            return None
        if node.op_type == "Add":
            one, other = node.inputs
            number = _number(other)
            place = None if number is None else _position(one, index)
            return None if place is None or number is None else place + int(number)
        if node.op_type not in _PASSED and node.op_type not in _RESHAPED:
            return None
        value = node.inputs[0]
    return None if value is None else 0


def _is_rest(vector: ir.Value, offsets: ir.Value) -> bool:
    known, all_known = constant_array(vector), constant_array(offsets)
    if known is not None and all_known is not None:
        return np.array_equal(known, all_known[1:])
    node = _producer(vector, "Slice")
    if node is None or node.inputs[0] is not offsets or _number(node.inputs[1]) != 1:
        return False
    end = _number(node.inputs[2])
    return end is not None and end >= np.iinfo(np.int32).max and _axes(node, 3) in (None, [0]) and _axes(node, 4) in (None, [1])


def _counts_bags(count: ir.Value | None, offsets: ir.Value) -> bool:
    difference, known = _producer(count, "Sub"), constant_array(offsets)
    shapes = [value.shape for value in (offsets, _source(offsets)) if value is not None and value.shape is not None]
    extents = [shape[0] for shape in shapes if len(shape) == 1 and isinstance(shape[0], int)] if known is None else [len(known)]
    number = _number(count)
    if number is not None:
        return number + 1 in extents
    if difference is not None and _number(difference.inputs[1]) == 1:
        whole = difference.inputs[0]
        return _number(whole) in extents or _source(_counted(whole)) is _source(offsets)
    vector = _counted(count)
    if vector is None:
        return False
    joined = _producer(offsets, "Concat")
    if joined is not None and len(joined.inputs) == 2 and joined.inputs[0] is vector and _is_one_element(joined.inputs[1]):
        return True
    return _is_rest(vector, offsets)


def _counted(value: ir.Value | None) -> ir.Value | None:
    node = _producer(value)
    while node is not None and node.op_type in {*_RESHAPED, "Gather"}:
        if node.op_type == "Gather" and _number(node.inputs[1]) != 0:
            return None
        node = _producer(node.inputs[0])
    return node.inputs[0] if node is not None and node.op_type in {"Shape", "Size"} else None


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_one_element(value: ir.Value | None) -> bool:
    if value is None:
        return False
    node = _producer(value)
    known = value.shape is not None and len(value.shape) == 1 and value.shape[0] == 1
    return known or (node is not None and node.op_type == "Unsqueeze" and _axes(node) == [0])


def _is_start_and_end(elements: list[tuple[ir.Value, int] | None]) -> bool:
    start, end = elements
    return start is not None and start[1] == 0 and end == (start[0], 1)


def _is_true(value: ir.Value | None) -> bool:
    return value is None or _number(value) == 1


def _is_zero(value: ir.Value | None) -> bool:
    node = _producer(value, "Expand")
    known = constant_array(node.inputs[0] if node is not None else value)
    return known is not None and not known.any()


def _producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    return producer_of(_source(value), *op_types)


def _source(value: ir.Value | None) -> ir.Value | None:
    return None if value is None else origin_of(value, _PASSED)


def _number(value: ir.Value | None) -> float | None:
    for known in (constant_array(value), constant_array(_source(value))):
        if known is not None and known.size == 1:
            return known.item()
    return None


def _axes(node: ir.Node, place: int = 1) -> list[int] | None:
    if len(node.inputs) > place and node.inputs[place] is not None:
        known = constant_array(node.inputs[place])
        return [] if known is None else known.tolist()
    axes = attribute_value(node, "axes", None)
    return None if axes is None else list(axes)
