"""State entries that a step changes in a few rows: the graph returns only these rows.

In a step's graph, the next value is a ``ScatterND`` of new rows into the present one, which would copy the whole table. A runner
removes that node, makes the graph return indices and rows instead, and writes them in place after the step has succeeded: no
table is copied, and a failed step changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from burnish.errors import EngineError
from burnish.program.signature import Entry, GraphSignature, Role


@dataclass(frozen=True)
class RowWrite:
    """The rows of a state entry that a step writes.

    Attributes:
        entry: the state entry.
        indices: the output with the rows' indices, int64 [n, 1], unique.
        rows: the output with their next values, [n, ...].
    """

    entry: str
    indices: str
    rows: str


class RowChanges:
    """The rows of state entries that a runner has written since ``begin``; nothing is recorded before.

    Its size grows with the number of distinct rows, not with the steps.

    Attributes:
        log: a function that is called with the state entries and the rows before they are written, while recording.
    """

    def __init__(self) -> None:
        self.log: Callable[[tuple[str, ...], np.ndarray], None] | None = None
        self._noted: dict[str, _Rows] | None = None
        self._entries: dict[str, list[str]] = {}

    @property
    def is_on(self) -> bool:
        """True while rows are recorded."""
        return self._noted is not None

    def begin(self) -> None:
        """Start a new recording."""
        self._noted = {}

    def stop(self) -> None:
        self._noted = None

    def note(self, writes: Iterable[RowWrite], indices: Mapping[str, np.ndarray]) -> None:
        """Record the rows that are about to be written.

        Args:
            writes: writes of the step.
            indices: int64, of any shape, by output name; copied.
        """
        if self._noted is None:
            return
        if not self._entries:
            for write in writes:
                self._entries.setdefault(write.indices, []).append(write.entry)
        for name, entries in self._entries.items():
            rows = np.array(indices[name], np.int64).reshape(-1)
            if self.log is not None:
                self.log(tuple(entries), rows)
            self._noted.setdefault(name, _Rows()).add(rows)

    def changed(self) -> dict[tuple[str, ...], np.ndarray]:
        """Return the rows written since ``begin``, int64, ascending, unique, by the state entries that share them."""
        noted = {} if self._noted is None else self._noted
        return {tuple(self._entries[name]): rows.merged() for name, rows in noted.items()}


class _Rows:
    """Rows added in parts; merged whenever the number of new ones reaches that of distinct ones."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._count = 0
        self._merged_at = 1 << 12

    def add(self, rows: np.ndarray) -> None:
        self._parts.append(rows)
        self._count += rows.size
        if self._count > self._merged_at:
            self._merged_at = max(self._merged_at, 2 * self.merged().size)

    def merged(self) -> np.ndarray:
        merged = np.unique(np.concatenate(self._parts)) if self._parts else np.empty(0, np.int64)
        self._parts, self._count = [merged], merged.size
        return merged


class RowWriter(Protocol):
    """A runner that writes rows of its state in place (``take_row_writes``), and records them.

    Attributes:
        row_changes: the rows that it has written.
    """

    row_changes: RowChanges

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return copies of rows of one state entry, without copying the others."""
        ...


def write_rows(writes: Sequence[RowWrite], outputs: dict[str, Any], put: Callable[[str, Any, Any], None]) -> None:
    """Write the rows of a successful step into the state; the caller blocks interrupts.

    Args:
        writes: writes of the step.
        outputs: outputs of the step; indices and rows are removed.
        put: a function that writes rows of a state entry: its name, indices [n], rows [n, ...].
    """
    rows = [(write.entry, outputs[write.indices].reshape(-1), outputs[write.rows]) for write in writes]
    for write in writes:
        outputs.pop(write.indices, None)
        outputs.pop(write.rows, None)
    for entry, indices, values in rows:
        put(entry, indices, values)


def written_by_rows(signature: GraphSignature) -> frozenset[str]:
    """Return the state entries that may be written by rows, according to the signature."""
    return frozenset(entry.updates for entry in signature.outputs if entry.by_rows and entry.updates is not None)


def take_row_writes(graph: ir.Graph, names: list[str], signature: GraphSignature) -> list[RowWrite]:
    """Remove the nodes that write rows of state entries from a step's graph, in place.

    Args:
        graph: graph of a step; its inputs have the names of the state entries.
        names: names of the graph's outputs, in order; updated.
        signature: signature of the program's step.

    Returns:
        The writes. In the graph, their operands replace their results as outputs, without duplicates.

    Raises:
        EngineError: the graph computes such an entry in another way than the signature says.
    """
    following = {entry.name: entry.updates for entry in signature.outputs if entry.by_rows and entry.updates is not None}
    outputs: dict[ir.Value, str] = {}
    remaining: list[tuple[ir.Value, str]] = []
    writes, gone = [], []
    for value, name in zip(list(graph.outputs), names, strict=True):
        node = value.producer()
        if name not in following or node is None or not _writes_rows(node, following[name]):
            remaining.append((value, name))
            continue
        _, indices, rows = node.inputs
        assert indices is not None
        assert rows is not None
        place = outputs.setdefault(indices, f"indices:{following[name]}")
        writes.append(RowWrite(following[name], place, outputs.setdefault(rows, f"rows:{following[name]}")))
        gone.append(node)
    missing = next((name for _, name in remaining if name in following), None)
    if missing is not None:
        raise EngineError(
            f"The output '{missing}' of the step graph is to write rows over '{following[missing]}', as the signature says, and "
            "is no ScatterND of them: compile the program again"
        )
    graph.outputs.clear()
    for value, name in (*remaining, *outputs.items()):
        if name not in names:
            value.name = name
        graph.outputs.append(value)
    names[:] = [name for _, name in (*remaining, *outputs.items())]
    graph.remove(gone, safe=True)
    return writes


def signature_of_writes(signature: GraphSignature, writes: Iterable[RowWrite]) -> GraphSignature:
    """Return the signature of a step without its row writes: their operands replace their results as outputs."""
    entries = {entry.updates: entry for entry in signature.outputs if entry.updates is not None}
    taken = {write.entry for write in writes}
    added: dict[str, Entry] = {}
    for write in writes:
        entry = entries[write.entry]
        shape = (None, *entry.extents[1:])
        added.setdefault(write.indices, Entry(write.indices, Role.INDICES, ir.DataType.INT64, (None, 1)))
        added.setdefault(write.rows, Entry(write.rows, Role.ROWS, entry.dtype, shape))
    remaining = tuple(entry for entry in signature.outputs if entry.updates not in taken)
    return replace(signature, outputs=(*remaining, *added.values()))


def _writes_rows(node: ir.Node, entry: str) -> bool:
    """True if a node writes rows of the present value of a state entry, and its result is only an output."""
    if node.op_type != "ScatterND" or node.domain != "" or node.outputs[0].uses():
        return False
    present = node.inputs[0]
    return present is not None and present.is_graph_input() and present.name == entry
