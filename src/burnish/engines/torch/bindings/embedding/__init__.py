"""Embedding tables: row lookups, sums of the gradients of equal rows, and in-place updates of these rows.

For an in-place update, the graph returns the gradient as it comes from the lookups: an index and a row for each. After the loss
was found to be finite, one call of the kernel sums the gradients of equal rows, and reads and writes each row of each table and
of its slots once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.engines.row_writes import RowWrite
from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.native import declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import attribute_value, constant_array
from burnish.kernels.elementwise.programs import Program, is_supported
from burnish.kernels.indexing import FUSED_COALESCE_ROWS, FUSED_LOOKUPS

declare_kernel(
    "rows",
    "coalesce_rows(Tensor indices, Tensor rows) -> (Tensor, Tensor)",
    "lookup_rows(Tensor[] tables, Tensor[] indices) -> Tensor[]",
    "update_rows_(Tensor(a!)[] tensors, Tensor plan, Tensor constants) -> ()",
)


calls_kernel(FUSED_COALESCE_ROWS, "coalesce_rows")


@translates(FUSED_LOOKUPS)
def lookups(op: Call) -> Any:
    """Translate tables, followed by as many tensors of indices -> rows of each."""
    operands = op.tensors()
    count = len(operands) // 2
    rows = torch.ops.burnish.lookup_rows.default(operands[:count], operands[count:])
    return tuple(rows[place] for place in range(count))


STATE, GRADIENT, SCALAR = range(3)  # the kernel's numbers for the values that a program reads
MOST_AXES = 3
"""The largest rank of a table: the engine stores tables of higher rank with channels last."""


@dataclass(frozen=True)
class RowUpdate:
    """The update of some rows of a table and its slots.

    Attributes:
        entries: the state entries that are written.
        indices: the output with the index of each gradient row, int64, in any order; negative ones count from the end.
        operands: state entries and outputs that the program reads.
        kinds, targets, constants, program: arguments of the kernel.
    """

    entries: tuple[str, ...]
    indices: str
    operands: tuple[str, ...]
    kinds: tuple[int, ...]
    targets: tuple[int, ...]
    constants: tuple[float, ...]
    program: tuple[int, ...]


class RowUpdates:
    """Updates that run in one call.

    Attributes:
        updates: the updates; those of similar tables are consecutive.
        entries: the state entries that are written.
    """

    def __init__(self, updates: Sequence[RowUpdate]):
        alike: dict[tuple[object, ...], list[RowUpdate]] = {}
        for update in updates:
            # Compared as text: zeros of different sign differ, and NaN equals NaN.
            key = (update.kinds, update.targets, tuple(map(repr, update.constants)), update.program)
            alike.setdefault(key, []).append(update)
        self.updates = tuple(update for members in alike.values() for update in members)
        self.entries = tuple(entry for update in self.updates for entry in update.entries)
        self._operands = tuple(name for update in self.updates for name in (update.indices, *update.operands))
        plan: list[int] = []
        constants: list[float] = []
        for members in alike.values():
            first = members[0]
            plan += len(members), len(first.kinds), len(first.targets), len(first.constants), len(first.program)
            plan += *first.kinds, *first.targets, *first.program
            constants += first.constants
        self._plan = torch.tensor(plan, dtype=torch.int64)
        self._constants = torch.tensor(constants, dtype=torch.float64)

    def run(self, state: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
        operands = [state[name] if name in state else results[name] for name in self._operands]
        torch.ops.burnish.update_rows_.default(operands, self._plan, self._constants)


def noted(
    writes: Sequence[RowWrite],
    updates: RowUpdates | None,
    state: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
) -> tuple[list[RowWrite], dict[str, np.ndarray]]:
    """Return the rows that a step is about to write.

    Args:
        writes: writes that the graph computed.
        updates: updates that the kernel computes, or None.
        state, results: the state, and the outputs of the graph.

    Returns:
        The writes of both, and the nonnegative rows for each of their indices.
    """
    all_writes = list(writes)
    rows = {name: results[name].cpu().numpy() for name in {write.indices for write in writes}}
    for update in () if updates is None else updates.updates:
        first = update.entries[0]
        name = f"rows of {first}"  # tables with the same indices may have different numbers of rows
        indices = results[update.indices].numpy()
        rows[name] = np.where(indices < 0, indices + state[first].shape[0], indices)
        all_writes += [RowWrite(entry, name, "") for entry in update.entries]
    return all_writes, rows


def take_row_updates(graph: ir.Graph, names: list[str], writes: list[RowWrite]) -> list[RowUpdate]:
    """Remove the nodes that compute rows of state entries from a step's graph, in place, if the kernel supports the computation.

    Args:
        graph: the fused graph of a step; its inputs have the names of the state entries.
        names: names of the graph's outputs, in order; updated.
        writes: result of ``take_row_writes``; writes that updates replace are removed.

    Returns:
        The updates. In the graph, their operands replace the rows as outputs.
    """
    tables: dict[str, list[RowWrite]] = {}
    for write in writes:
        tables.setdefault(write.indices, []).append(write)
    values = dict(zip(names, graph.outputs, strict=True))
    inputs = {value.name or "": value for value in graph.inputs}
    computed: dict[str, _Computed] = {}
    for indices, members in tables.items():
        rows = {inputs[write.entry]: values[write.rows] for write in members}
        program = _computed(values[indices], rows)
        if program is not None:
            computed[indices] = program
    taken = {name for indices in computed for write in tables[indices] for name in (write.indices, write.rows)}
    kept = [(value, name) for value, name in zip(graph.outputs, names, strict=True) if name not in taken]
    graph.outputs.clear()
    graph.outputs.extend(value for value, _ in kept)
    _remove_unread(graph, [node for program in computed.values() for node in program.nodes])
    outputs = dict(kept)
    added: dict[ir.Value, str] = {}
    updates = []
    for program in computed.values():
        places, operands = program.operands()
        for value in (places, *operands):
            if value not in outputs and program.entry_of(value) is None:
                outputs[value] = added[value] = f"row operand:{len(added)}"
        read = tuple(program.entry_of(value) or outputs[value] for value in operands)
        updates.append(program.update(outputs[places], read))
    graph.outputs.extend(added)
    names[:] = [*(name for _, name in kept), *added.values()]
    writes[:] = [write for write in writes if write.indices not in computed]
    _remove_unread(graph, [node for program in computed.values() for node in program.sums])
    return updates


def _remove_unread(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    candidates = set(nodes)
    unread = []
    for node in reversed(list(graph)):
        if node in candidates and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            for place in range(len(node.inputs)):
                node.replace_input_with(place, None)
            unread.append(node)
    graph.remove(unread, safe=True)


class _UnknownValue(Exception):
    """The kernel neither computes nor reads a value."""


def _computed(places: ir.Value, rows: Mapping[ir.Value, ir.Value]) -> _Computed | None:
    """Return the computation of the next rows of each table or slot at ``places`` [n, 1]; None if unsupported."""
    unsqueezed = places.producer()
    distinct = None if unsqueezed is None or unsqueezed.op_type != "Unsqueeze" else unsqueezed.inputs[0]
    summed = None if distinct is None else distinct.producer()
    if unsqueezed is None or summed is None or not FUSED_COALESCE_ROWS.is_of(summed) or distinct is not summed.outputs[0]:
        return None
    try:
        return _Computed(unsqueezed, summed, rows)
    except _UnknownValue:
        return None


class _Computed:
    """The computation of the next rows of a table and its slots, as a program of the kernel.

    Attributes:
        nodes: the nodes that compute the next rows from the sums.
        sums: the nodes that sum the gradient and prepare its indices.

    Raises:
        _UnknownValue: the kernel does not support the computation.
    """

    def __init__(self, unsqueezed: ir.Node, summed: ir.Node, rows: Mapping[ir.Value, ir.Value]):
        self.nodes, self.sums = [unsqueezed], [summed]
        self._summed, self._distinct, self._gradient = summed, *summed.outputs
        shapes = [table.shape for table in rows if table.shape is not None]
        self._inner = max((tuple(shape.dims[1:]) for shape in shapes), key=len, default=())
        if len(shapes) < len(rows) or len(self._inner) >= MOST_AXES or len(set(rows.values())) < len(rows):
            raise _UnknownValue
        self._leaves: dict[ir.Value, int] = {}
        self._tables: dict[ir.Value, ir.Value] = {}
        self._known: set[ir.Value] = set()
        program = Program()
        for table, value in rows.items():
            self._add(program, value)
            if self._extent(value) != self._extent_of_table(table):
                raise _UnknownValue
        self._code = tuple(program.assemble(list(rows.values()))[0])
        self._constants = tuple(program.constants)
        self._read = tuple(program.tensors)
        owners = [self._tables.get(value) for value in self._read]
        if self._gradient not in self._read or any(table not in owners for table in rows):
            raise _UnknownValue
        self._targets = tuple(owners.index(table) for table in rows)

    def entry_of(self, value: ir.Value) -> str | None:
        """Return the state entry whose rows a value holds."""
        table = self._tables.get(value)
        return None if table is None else table.name

    def operands(self) -> tuple[ir.Value, list[ir.Value]]:
        """Return the indices of the gradient's rows, and the operands of the program, after its nodes were removed.

        If something else reads the sums, the program reads them too; otherwise it reads the original gradient.
        """
        if any(value.uses() or value.is_graph_output() for value in self._summed.outputs):
            return self._distinct, list(self._read)
        indices, gradient = self._summed.inputs
        assert indices is not None
        assert gradient is not None
        indices = self._as_given(indices)
        gradient = self._before_reshapes(gradient)
        return indices, [gradient if value is self._gradient else value for value in self._read]

    def update(self, indices: str, operands: tuple[str, ...]) -> RowUpdate:
        kinds = tuple(self._leaves[value] for value in self._read)
        entries = tuple(operands[target] for target in self._targets)
        return RowUpdate(entries, indices, operands, kinds, self._targets, self._constants, self._code)

    def _add(self, program: Program, value: ir.Value) -> None:
        if value in self._known or constant_array(value) is not None:
            if value not in self._known and not _is_number(value):
                raise _UnknownValue
            return
        self._known.add(value)
        node = value.producer()
        table = None if node is None else self._table_of(node)
        if value is self._gradient:
            self._leaves[value] = GRADIENT
        elif table is not None and node is not None:
            self._leaves[value] = STATE
            self._tables[value] = table
            self._extent_of_table(table)
            self.nodes.append(node)
        elif _is_number(value) and value.dtype in (ir.DataType.FLOAT, ir.DataType.BOOL):
            self._leaves[value] = SCALAR
        elif node is None:
            raise _UnknownValue
        else:
            self._add_node(program, node)
            self.nodes.append(node)

    def _add_node(self, program: Program, node: ir.Node) -> None:
        operand, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if operand is None:
            raise _UnknownValue
        if node.domain == "" and node.op_type in ("ReduceMean", "Unsqueeze"):
            self._check_axes(node)
            self._add(program, operand)
            of_rows = self._extent(operand) == ROW_OF_ELEMENTS
            if of_rows != (node.op_type == "ReduceMean"):
                raise _UnknownValue
            (program.average_rows if of_rows else program.rename)(operand, result)
            return
        extent = self._extent(result)
        if extent is None or not is_supported(node) or ir.DataType.BFLOAT16 in {value.dtype for value in node.inputs if value}:
            raise _UnknownValue
        for value in node.inputs:
            if value is None:
                continue
            self._add(program, value)
            # One number per row broadcasts to elements if it has as many axes.
            fits = self._extent(value) == extent or _is_number(value)
            if not fits and not (extent == ROW_OF_ELEMENTS and self._extent(value) == ROW_OF_ONE):
                raise _UnknownValue
        program.add(node)

    def _check_axes(self, node: ir.Node) -> None:
        axes = constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        rank = len(self._inner) + 1
        if axes is None or sorted(int(axis) % rank for axis in axes.reshape(-1)) != list(range(1, rank)):
            raise _UnknownValue

    def _table_of(self, node: ir.Node) -> ir.Value | None:
        if node.op_type != "Gather" or node.domain != "" or attribute_value(node, "axis", 0) != 0:
            return None
        table = node.inputs[0]
        return table if node.inputs[1] is self._distinct and table is not None and table.is_graph_input() else None

    def _extent_of_table(self, table: ir.Value) -> str:
        if table.dtype != ir.DataType.FLOAT or table.shape is None:
            raise _UnknownValue
        extent = self._extent_of(tuple(table.shape.dims[1:]))
        if extent is None:
            raise _UnknownValue
        return extent

    def _extent(self, value: ir.Value) -> str | None:
        """Return the extent of a value per row; None if it has no rows."""
        if value.shape is None or not value.shape.dims or isinstance(value.shape.dims[0], int):
            return None
        return self._extent_of(tuple(value.shape.dims[1:]))

    def _extent_of(self, inner: tuple[object, ...]) -> str | None:
        if inner == self._inner:
            return ROW_OF_ELEMENTS
        if inner and len(inner) == len(self._inner) and all(extent == 1 for extent in inner):
            return ROW_OF_ONE
        return NUMBER if not inner else None

    def _as_given(self, indices: ir.Value) -> ir.Value:
        """Return the original indices, before negative ones were converted: the kernel converts them too."""
        node = indices.producer()
        if node is not None and node.op_type == "Where" and node.domain == "":
            below, from_front, given = node.inputs
            compared = None if below is None else below.producer()
            added = None if from_front is None else from_front.producer()
            if given is not None and self._counts_below_zero(compared, given) and self._adds_rows(added, given):
                self.sums += [node for node in (node, compared, added) if node is not None]
                return self._before_reshapes(given)
        return self._before_reshapes(indices)

    def _counts_below_zero(self, node: ir.Node | None, given: ir.Value) -> bool:
        if node is None or node.op_type != "Less" or node.inputs[0] is not given or node.inputs[1] is None:
            return False
        bound = constant_array(node.inputs[1])
        return bound is not None and not bound.any()

    def _adds_rows(self, node: ir.Node | None, given: ir.Value) -> bool:
        if node is None or node.op_type != "Add" or node.inputs[0] is not given or node.inputs[1] is None:
            return False
        added = constant_array(node.inputs[1])
        table = next(iter(self._tables.values()))
        return added is not None and table.shape is not None and added.reshape(-1).tolist() == [table.shape[0]]

    def _before_reshapes(self, value: ir.Value) -> ir.Value:
        """Return a value before its reshapes: the kernel reads consecutive rows of elements, whatever the leading axes."""
        while (node := value.producer()) is not None and node.op_type == "Reshape" and node.domain == "":
            assert node.inputs[0] is not None
            self.sums.append(node)
            value = node.inputs[0]
        return value


ROW_OF_ELEMENTS, ROW_OF_ONE, NUMBER = "elements", "one element", "a number"
"""Extents per row: as many elements as the table has; one element, with as many axes; or one number without these axes."""


def _is_number(value: ir.Value) -> bool:
    array = constant_array(value)
    if array is not None:
        return bool(array.size == 1)
    return value.shape is not None and value.shape.is_static() and all(extent == 1 for extent in value.shape.dims)
