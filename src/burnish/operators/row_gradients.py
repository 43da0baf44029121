"""Sparse gradients of a table: the rows that were read, and the sum for each.

The gradient of a table that Gather reads on axis 0 is zero in all other rows. ``GatherGrad`` gives it as a whole tensor;
``parts_of`` splits such a gradient again, and ``coalesced`` adds up the parts of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor, describe_node, known_extents, source_of
from burnish.operators.indexing import GATHER_GRAD, from_the_front
from burnish.operators.positions import extent, reshape_to
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator


def _coalesced(operands: Operands) -> list[OutputType]:
    """One row per distinct index, a number known only at run time."""
    indices, rows = operands["indices"], operands["rows"]
    inner = [] if rows.shape is None else rows.shape.dims[1:]
    return [
        OutputType(indices.dtype, ir.Shape([None])),
        OutputType(rows.dtype, None if rows.shape is None else ir.Shape([None, *inner])),
    ]


def lower_coalesce_rows(op: Operation) -> tuple[Tensor, Tensor]:
    """The rows of an index are added in their order, as in a dense gradient: the bits are the same."""
    indices, rows = op.required(0), op.required(1)
    builder = op.builder
    distinct, _, places = builder.op("Unique", indices, sorted=1, outputs=3)
    for value, like in ((distinct, indices), (places, indices)):
        value.value.dtype, value.value.shape = like.dtype, ir.Shape([None])
    inner = [] if rows.shape is None else list(rows.shape.dims[1:])
    shape = builder.op("Concat", extent(distinct, 0), builder.op("Shape", rows, start=1), axis=0)
    zero = ir.tensor(np.zeros(1, rows.dtype.numpy()))
    zeros = builder.op("ConstantOfShape", shape, value=zero, dtype=rows.dtype, shape=ir.Shape([None, *inner]))
    return distinct, GATHER_GRAD(rows, places, zeros, axis=0)


def parts_of(gradient: Tensor, table: ir.Value) -> list[tuple[Tensor, Tensor]] | str:
    """Split the gradient of a table.

    Args:
        gradient: the gradient of the table from the reverse pass.
        table: the differentiated table.

    Returns:
        For each Gather on axis 0 that reads the table, its indices, of any shape, and the cotangent of its output; or the
        description of another reader, if there is one.
    """
    builder, parts, pending = gradient.builder, [], [gradient.value]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is not None and node.op_type == "Add" and node.domain == "":
            pending += [operand for operand in reversed(node.inputs) if operand is not None]
            continue
        if node is None or not _adds_rows(node, table):
            return "an unknown reader" if node is None else _reader(node)
        cotangent, indices = node.inputs[0], node.inputs[1]
        assert cotangent is not None
        assert indices is not None
        parts.append((builder.tensor(indices), builder.tensor(cotangent)))
    return parts


def is_read_by_row(gradient: Tensor, table: ir.Value) -> bool:
    """True if a part of the gradient of a table comes from a Gather on axis 0."""
    pending = [gradient.value]
    while pending:
        node = pending.pop().producer()
        if node is not None and _adds_rows(node, table):
            return True
        if node is not None and node.op_type == "Add" and node.domain == "":
            pending += [operand for operand in node.inputs if operand is not None]
    return False


def coalesced(parts: Sequence[tuple[Tensor, Tensor]], table: Tensor, held: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Emit the rows of a table that have a gradient, unique and ascending, and the gradient of each.

    Args:
        parts: indices and cotangents from ``parts_of``.
        table: a table of known shape.
        held: rows to omit.

    Returns:
        Indices [n] of int64 and rows [n, ...] of the table's dtype.
    """
    builder = table.builder
    assert table.shape is not None
    extents = known_extents(table.shape.dims[1:])
    assert extents is not None
    indices = [from_the_front(indices, extent(table, 0)) for indices, _ in parts]
    rows = [reshape_to(cotangent, [-1, *extents]) if 0 not in extents else cotangent for _, cotangent in parts]
    for tensor in rows:
        tensor.value.shape = ir.Shape([tensor.dimension(0), *extents])
    one = indices[0] if len(parts) == 1 else builder.op("Concat", *indices, axis=0)
    gradient = rows[0] if len(parts) == 1 else builder.op("Concat", *rows, axis=0)
    if held:
        column = builder.op("Unsqueeze", one, builder.integers([1]))
        others = builder.op("Not", builder.op("Equal", column, builder.integers(list(held))))
        counted = builder.op("ReduceMin", builder.cast(others, ir.DataType.INT64), builder.integers([1]), keepdims=0)
        moving = builder.cast(counted, ir.DataType.BOOL)
        one, gradient = (builder.op("Compress", tensor, moving, axis=0) for tensor in (one, gradient))
        one.value.shape, gradient.value.shape = ir.Shape([None]), ir.Shape([None, *extents])
    distinct, sums = COALESCE_ROWS.emit(one, gradient)
    return distinct, sums


def _adds_rows(node: ir.Node, table: ir.Value) -> bool:
    return GATHER_GRAD.is_of(node) and node.inputs[2] is table and node.attributes["axis"].as_int() == 0


def _reader(node: ir.Node) -> str:
    return (source_of(node) or describe_node(node)).removeprefix("gradient of ")


COALESCE_ROWS = SemanticOperator(
    "CoalesceRows", ("indices", "rows"), ("distinct", "sums"), _coalesced, constants=("distinct",), lowering=lower_coalesce_rows
)
"""From indices [n], not negative, and rows [n, ...]: the distinct indices, ascending, and the sum of the rows of each."""

OPERATORS = [COALESCE_ROWS]
