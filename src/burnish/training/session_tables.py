"""The embedding tables of a session in mapped files: when they are written, and what they follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from burnish.engines.row_writes import RowWriter, written_by_rows
from burnish.errors import ConfigurationError, EngineError
from burnish.files.mapped_tables import MappedTables
from burnish.files.row_journal import JournalPlace
from burnish.program import Program
from burnish.program.state import kind_of


class SessionTables:
    """Embedding tables in a folder, and what they are to be filled with before they are used.

    Args:
        folder: as ``Session`` takes it.
        program: whose tables they are.
        state: the state that the session begins with.
        is_own: nobody else changes ``state``: the tables are filled when they are first used, and not at all where a checkpoint
            is restored before.
        among_workers: the program is trained by several.

    Raises:
        ConfigurationError: no table of the program is updated by rows, the folder holds something else or is in use, or there are
            several workers.
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, program: Program, state: Mapping[str, np.ndarray], is_own: bool, among_workers: bool):
        if among_workers:
            raise ConfigurationError(
                "tables: several workers do not keep their tables in files: leave out tables or parallel (--tables, --workers)"
            )
        names = sorted(written_by_rows(program.signature["step"]))
        if not names:
            raise ConfigurationError(
                "tables: no table of this program is updated by rows: leave it out, or compile with sparse='auto' "
                "(--sparse auto) or sparse=[...]"
            )
        kinds = {name: kind_of(state, name) for name in names}
        self._mapped = MappedTables(folder, {name: kind for name, kind in kinds.items() if math.prod(kind[1])})
        self._awaited: Mapping[str, np.ndarray] | None = state
        self._is_torn = False
        if not is_own:
            self.settle()

    def instead(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """A state with these tables in place of its own, for an engine to work on."""
        return self._mapped.instead(state)

    def check(self, engine: str, writer: RowWriter | None) -> RowWriter:
        """Return what says which rows a runner writes, which then works on the tables; EngineError for one that copies them."""
        if writer is None:
            raise EngineError(
                f"tables: the engine '{engine}' does not work on tables in files: use engine='onnxruntime', 'torch' or "
                "'reference'"
            )
        writer.row_changes.log = self._mapped.note
        return writer

    def reading(self, read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        """Return what reads a state entry: a table here, without copying it, or by ``read``."""
        tables = self._mapped.tables
        return lambda name: tables[name].view(np.ndarray) if name in tables else read(name)

    def settle(self) -> None:
        """Fill the tables with what they wait for.

        Raises:
            EngineError: they hold a part of another state, as an earlier filling failed; or another session has them now.
            CheckpointError: a file of them was cut short.
        """
        if self._awaited is not None:
            self._fill(self._awaited)
        if self._is_torn:
            raise EngineError(
                f"The tables in '{self._mapped.folder}' were filled in part, and then that failed: restore a checkpoint, or open "
                "another session"
            )
        if self._mapped.is_taken_over:
            raise EngineError(
                f"The tables of this session, which is closed, were in '{self._mapped.folder}', and another session has that now"
            )
        self._mapped.check_whole()

    def load(self, state: Mapping[str, np.ndarray], place: JournalPlace | None) -> None:
        """Fill the tables with those of a state; with a place in a journal, follow it from there."""
        self._fill(state, place)
        if place is not None:
            self._mapped.follow(place)

    def _fill(self, state: Mapping[str, np.ndarray], place: JournalPlace | None = None) -> None:
        self._is_torn = True
        self._awaited = None
        self._mapped.fill(state, place)
        self._is_torn = False

    def agrees_with(self, place: JournalPlace) -> bool:
        """Return whether the tables were the same as a checkpoint, but for rows that are known."""
        return self._mapped.agrees_with(place)

    def follow(self, place: JournalPlace) -> None:
        """Note that the tables are the same as a checkpoint that was written."""
        self._mapped.follow(place)

    def close(self) -> None:
        """Leave the folder to other sessions."""
        self._mapped.release()
