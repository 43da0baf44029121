"""Next values of state entries that differ from the present ones in a few rows: the rows alone leave the graph.

In a step's graph such a value is a ``ScatterND`` of new rows into the present value, which makes a new tensor of the whole table.
A runner takes that node out, lets the graph return indices and rows instead, and writes them over the present rows once the step
has succeeded: no table is copied, and a step that fails leaves every one as it was.
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
    """What a step writes over rows of a state entry.

    Attributes:
        entry: the state entry.
        indices: the output with the rows' indices, int64 [n, 1], each once.
        rows: the output with their next values, [n, ...].
    """

    entry: str
    indices: str
    rows: str


class RowChanges:
    """Which rows of state entries a runner has written since ``begin``; nothing is noted before it.

    What it holds grows with the rows that differ, and not with the steps.

    Attributes:
        log: called with the state entries and the rows, before they are written, while rows are noted.
    """

    def __init__(self) -> None:
        self.log: Callable[[tuple[str, ...], np.ndarray], None] | None = None
        self._noted: dict[str, _Rows] | None = None
        self._entries: dict[str, list[str]] = {}

    @property
    def is_on(self) -> bool:
        """Whether rows are noted."""
        return self._noted is not None

    def begin(self) -> None:
        """Note rows from here on, and forget those before."""
        self._noted = {}

    def stop(self) -> None:
        """Note nothing any more."""
        self._noted = None

    def note(self, writes: Iterable[RowWrite], indices: Mapping[str, np.ndarray]) -> None:
        """Note the rows that are about to be written.

        Args:
            writes: of the step.
            indices: int64, of any shape, by the name of the output that they are; they are copied.
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
        """Return the rows written since ``begin``, int64, ascending, each once, by the state entries that share them."""
        noted = {} if self._noted is None else self._noted
        return {tuple(self._entries[name]): rows.merged() for name, rows in noted.items()}


class _Rows:
    """Rows that come in parts; merged whenever as many have come as there were different ones."""

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
    """What writes rows of its state in place (``take_row_writes``), and says which.

    Attributes:
        row_changes: the rows that it has written.
    """

    row_changes: RowChanges

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return copies of rows of one state entry, without copying the others."""
        ...


def write_rows(writes: Sequence[RowWrite], outputs: dict[str, Any], put: Callable[[str, Any, Any], None]) -> None:
    """Write what a step computed over rows of the state, when it has succeeded; the caller lets no interrupt in.

    Args:
        writes: of the step.
        outputs: of the step; indices and rows are taken out of it.
        put: writes rows of a state entry: its name, indices [n], rows [n, ...].
    """
    rows = [(write.entry, outputs[write.indices].reshape(-1), outputs[write.rows]) for write in writes]
    for write in writes:
        outputs.pop(write.indices, None)
        outputs.pop(write.rows, None)
    for entry, indices, values in rows:
        put(entry, indices, values)


def written_by_rows(signature: GraphSignature) -> frozenset[str]:
    """The state entries that may be written by rows, as the signature says."""
    return frozenset(entry.updates for entry in signature.outputs if entry.by_rows and entry.updates is not None)


def take_row_writes(graph: ir.Graph, names: list[str], signature: GraphSignature) -> list[RowWrite]:
    """Take the nodes that write rows of state entries out of a step's graph, in place.

    Args:
        graph: of a step; its inputs have the names of the state entries that they are.
        names: of the graph's outputs, in their order; changed with them.
        signature: of the step as the program has it.

    Returns:
        The writes. The graph has lost the outputs that they give, and gained those that they read, each once.

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
    """The signature of a step whose row writes were taken out: what they read is returned, in the place of what they gave."""
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
    """Whether a node writes rows of the present value of a state entry, and nothing else reads what it gives."""
    if node.op_type != "ScatterND" or node.domain != "" or node.outputs[0].uses():
        return False
    present = node.inputs[0]
    return present is not None and present.is_graph_input() and present.name == entry
