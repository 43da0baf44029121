"""Row lookups by index, and their gradients: the operators that graph passes insert.

``extent`` of ``FusedGatherGrad`` is the extent of the axis that was read; the other operand of the semantic operator, whose shape
the result has, is not read.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, replace_node, static_dimension
from burnish.graph.constants import constant_array
from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.row_gradients import COALESCE_ROWS

FUSED_GATHER_GRAD = EngineOperator("FusedGatherGrad", ("dy", "indices"), ("d_data",))


FUSED_COALESCE_ROWS = EngineOperator("FusedCoalesceRows", COALESCE_ROWS.inputs, COALESCE_ROWS.outputs)
FUSED_LOOKUPS = EngineOperator("FusedLookups", ("tables and indices...",), ("rows...",))


def use_gather_kernels(graph: ir.Graph, threads: int) -> bool:
    """Replace gradients of Gather by ``burnish.FusedGatherGrad``, in place.

    This applies to float32 rows read by int64 indices, along an axis of known extent. A single constant index is not replaced:
    standard operators pad there.

    Args:
        graph: the graph.
        threads: number of threads of the kernel.
    """
    changed = False
    for node in list(graph):
        if not GATHER_GRAD.is_of(node):
            continue
        dy, indices, data = node.inputs
        assert dy is not None
        assert indices is not None
        assert data is not None
        if dy.dtype != ir.DataType.FLOAT or indices.dtype != ir.DataType.INT64 or data.shape is None:
            continue
        axis = attribute_value(node, "axis", 0) % len(data.shape)
        extent, array = data.shape[axis], constant_array(indices)
        if not isinstance(extent, int) or indices.shape is None or (array is not None and array.size == 1):
            continue
        builder = Builder(graph, before=node)
        operands = (builder.tensor(dy), builder.tensor(indices))
        result = FUSED_GATHER_GRAD(*operands, like=builder.tensor(data), axis=axis, extent=extent, threads=threads)
        replace_node(node, result)
        changed = True
    return changed


SUMMED = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""The dtypes of rows that the kernel sums."""

MANY_ROWS = 1 << 16
MANY_LOOKUPS = 4
"""The numbers of table rows and of lookups from which building the kernel is worth it: it prefetches rows, and is called once."""


def use_row_kernels(graph: ir.Graph) -> bool:
    """Replace sums of rows, and lookups whose table and indices are inputs of the graph, by calls of the kernels, in place."""
    changed = False
    for node in list(graph):
        if COALESCE_ROWS.is_of(node) and node.outputs[1].dtype in SUMMED:
            FUSED_COALESCE_ROWS.replace(node)
            changed = True
    lookups = [node for node in graph if _is_lookup(node)]
    if len(lookups) >= MANY_LOOKUPS or any(_rows(node) >= MANY_ROWS for node in lookups):
        _join_lookups(graph, lookups)
        changed = True
    return changed


def _is_lookup(node: ir.Node) -> bool:
    """True if a node reads rows of a table by indices, and both are inputs."""
    if node.op_type != "Gather" or node.domain != "" or attribute_value(node, "axis", 0) != 0:
        return False
    table, indices = node.inputs
    if table is None or indices is None or not table.is_graph_input() or not indices.is_graph_input():
        return False
    shape = table.shape
    is_table = shape is not None and 2 <= len(shape) <= 3 and shape.is_static()
    return is_table and indices.dtype == ir.DataType.INT64 and indices.shape is not None


def _rows(node: ir.Node) -> int:
    table = node.inputs[0]
    assert table is not None
    rows = static_dimension(table.shape, 0)
    assert rows is not None
    return rows


def _join_lookups(graph: ir.Graph, lookups: list[ir.Node]) -> None:
    builder = Builder(graph, before=lookups[0])
    operands: list[Tensor] = []
    for place in (0, 1):
        for node in lookups:
            value = node.inputs[place]
            assert value is not None
            operands.append(builder.tensor(value))
    rows = builder.op(FUSED_LOOKUPS.name, *operands, domain=FUSED_LOOKUPS.key[0], outputs=len(lookups))
    for node, result in zip(lookups, rows if isinstance(rows, tuple) else (rows,), strict=True):
        result.value.type, result.value.shape = node.outputs[0].type, node.outputs[0].shape
        replace_node(node, (result,))
