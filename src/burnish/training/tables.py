"""The embedding tables of a session in mapped files, and journals of the rows changed between checkpoints."""

from __future__ import annotations

import contextlib
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.engines.row_writes import RowChanges, RowWriter, written_by_rows
from burnish.errors import CheckpointError, ConfigurationError, EngineError
from burnish.files.digest import DIGEST
from burnish.files.file_writing import file_path
from burnish.files.mapped_tables import MappedTables
from burnish.files.row_journal import JournalPlace, append_changes, start_of
from burnish.files.state_file import StateFile
from burnish.program import Program
from burnish.program.state import chosen, kind_of
from burnish.training.checkpoint import EXAMPLE, JOURNAL, place_of, write_checkpoint


class SessionTables:
    """Embedding tables in a folder, filled before their first use.

    Args:
        folder: as in ``Session``.
        program: program with the tables.
        state: initial state of the session.
        is_own: True if nobody else changes ``state``: the tables are then filled at first use, or never if a checkpoint is
            restored before.
        among_workers: True if several workers train the program.

    Raises:
        ConfigurationError: no table of the program is updated by rows, the folder has other files or is in use, or there are
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
        """Return a state with the mapped tables, for an engine to work on."""
        return self._mapped.instead(state)

    def check(self, engine: str, writer: RowWriter | None) -> RowWriter:
        """Return the tracker of rows that a runner writes to the tables; raise EngineError for an engine that copies them."""
        if writer is None:
            raise EngineError(
                f"tables: the engine '{engine}' does not work on tables in files: use engine='onnxruntime', 'torch' or "
                "'reference'"
            )
        writer.row_changes.log = self._mapped.note
        return writer

    def reading(self, read: Callable[[str], np.ndarray]) -> Callable[[str], np.ndarray]:
        """Return a reader of state entries: mapped tables without a copy, others by ``read``."""
        tables = self._mapped.tables
        return lambda name: tables[name].view(np.ndarray) if name in tables else read(name)

    def settle(self) -> None:
        """Fill the tables if they wait for a state.

        Raises:
            EngineError: an earlier filling failed and left a partial state; or another session has them now.
            CheckpointError: a table file was truncated.
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
        """Fill the tables from a state; with a place in a journal, follow it from there."""
        self._fill(state, place)
        if place is not None:
            self._mapped.follow(place)

    def _fill(self, state: Mapping[str, np.ndarray], place: JournalPlace | None = None) -> None:
        self._is_torn = True
        self._awaited = None
        self._mapped.fill(state, place)
        self._is_torn = False

    def agrees_with(self, place: JournalPlace) -> bool:
        """Return True if the tables differ from a checkpoint only in known rows."""
        return self._mapped.agrees_with(place)

    def follow(self, place: JournalPlace) -> None:
        """Note that the tables equal a written checkpoint."""
        self._mapped.follow(place)

    def close(self) -> None:
        """Release the folder for other sessions."""
        self._mapped.release()


SHARE = 0.5
"""Size of the records relative to the base from which a new base replaces them."""
_OURS = re.compile(r"(\.?base-[0-9a-f]{8}\.safetensors(\.[0-9a-f]{8}\.partial)?|rows-[0-9a-f]{8}\.journal|\.tmp[A-Za-z0-9]{6})")


def check_journal(program: Program, writer: RowWriter | None) -> RowWriter:
    """Return the tracker of rows that a runner writes (``ProgramRunner.row_writer``).

    Raises:
        ConfigurationError: no table of the program is updated by rows, or the engine does not track them.
    """
    if not written_by_rows(program.signature["step"]):
        raise ConfigurationError(
            "journal: no table of this program is updated by rows, so that every checkpoint would be whole: leave it out, or "
            "compile with sparse='auto' (--sparse auto) or sparse=[...]"
        )
    if writer is None:
        raise ConfigurationError(
            "journal: the engine does not say which rows a step has written, or workers step alone or hold parts of the tables: "
            "leave it out, or train with engine='onnxruntime' or 'torch', without synchronize_every"
        )
    return writer


@dataclass
class Journal:
    """The journal for the checkpoints of a session.

    Attributes:
        folder: folder of the checkpoints.
        place: place of the state when rows were last noted.
    """

    folder: Path
    place: JournalPlace

    @staticmethod
    def at(path: Path, place: JournalPlace | None) -> Journal | None:
        """Return the journal that a restored checkpoint continues, or None."""
        return None if place is None else Journal(path.parent.absolute(), place)


class ClosedTables:
    """The rows of a closed session, which replaces its runner.

    Args:
        row_changes: changes left by the runner.
        state: state of the session.
    """

    def __init__(self, row_changes: RowChanges, state: Mapping[str, np.ndarray]):
        self.row_changes, self._state = row_changes, state

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return np.take(self._state[name], rows, axis=0)


def save_journal(
    journal: Journal | None,
    path: str | Path,
    program: Program,
    state: Mapping[str, np.ndarray],
    writer: RowWriter,
    check: Callable[[str, np.ndarray], None],
    **described: Any,
) -> Journal:
    """Write a checkpoint as changes since the last one, or with a new base if there is no earlier one.

    Args:
        journal: journal after the last written or restored checkpoint of the session.
        path: path of the checkpoint.
        program, state: program and state to save; lazy entries are made only if written.
        writer: tracker of changed rows.
        check: function called with names and arrays before they are written.
        described: as in ``write_checkpoint``.

    Returns:
        The journal to continue with.

    Raises:
        CheckpointError: a file cannot be written, or ``check`` raised it; the earlier checkpoint is untouched.
    """
    path = file_path(path, EXAMPLE)
    folder = path.parent.absolute()
    changes = writer.row_changes
    by_rows = written_by_rows(program.signature["step"])
    updated = program.signature["step"].updates
    rest = chosen(state, [name for name in updated if name not in by_rows])
    place = journal.place if journal is not None and journal.folder == folder and changes.is_on else None
    if place is not None and _goes_on(folder, path, place):
        changed = {entries: rows for entries, rows in changes.changed().items() if rows.size}
        if changed:
            end = append_changes(folder / JOURNAL / place.rows, place.end, changed, writer.state_rows, check)
            place = replace(place, end=end)
    else:
        place = None
    is_new = place is None
    if place is None:
        place = _new_base(folder, state, check, described)
    write_checkpoint(path, rest, check=check, journal=place, **described)
    changes.begin()
    if is_new:
        remove_unused(folder)
    return Journal(folder, place)


def _goes_on(folder: Path, path: Path, place: JournalPlace) -> bool:
    """Return True if the next records can be appended at a place, False if a new base is needed.

    A new base is needed if the records have grown too long, or if another checkpoint needs the records after the place: the
    session then went back to an earlier checkpoint.
    """
    base = folder / JOURNAL / place.base
    if not base.is_file() or place.end.size > SHARE * base.stat().st_size:
        return False
    rows = folder / JOURNAL / place.rows
    if not rows.is_file() or rows.stat().st_size <= place.end.size:
        return True
    others = [other for other_path, other in _places(folder) if other_path != path.absolute()]
    return not any(other.base == place.base and other.end.size > place.end.size for other in others)


def _new_base(
    folder: Path,
    state: Mapping[str, np.ndarray],
    check: Callable[[str, np.ndarray], None],
    described: Mapping[str, Any],
) -> JournalPlace:
    name = f"base-{uuid.uuid4().hex[:8]}.safetensors"
    write_checkpoint(folder / JOURNAL / name, state, check=check, **described)
    with StateFile(folder / JOURNAL / name, "base of a journal") as written:
        return JournalPlace(name, written.metadata[DIGEST], start_of(name))


def _places(folder: Path) -> Iterator[tuple[Path, JournalPlace]]:
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(CheckpointError):  # damaged or not a checkpoint: it needs nothing
            if (place := place_of(path)) is not None:
                yield path.absolute(), place


def unfinished(path: Path) -> str | None:
    """Return a note on records after those of the newest checkpoint of a journal; None if there are none.

    Args:
        path: path of a checkpoint.
    """
    with contextlib.suppress(CheckpointError, OSError):
        place = place_of(path)
        rows = None if place is None else path.parent / JOURNAL / place.rows
        if place is not None and rows is not None and rows.is_file():
            ends = [other.end.size for _, other in _places(path.parent) if other.base == place.base]
            more = rows.stat().st_size - max(ends)
            if more > 0:
                return (
                    f"Dropped: the last {more:,} bytes of the journal '{rows}', of a checkpoint that was not finished; the run "
                    f"goes on from '{path.name}'"
                )
    return None


def remove_unused(folder: Path) -> None:
    """Remove bases and journals in a checkpoint folder that no checkpoint needs, and partial files."""
    journals = folder / JOURNAL
    if not journals.is_dir():
        return
    needed = {name for _, place in _places(folder) for name in (place.base, place.rows)}
    for path in journals.iterdir():
        if path.name not in needed and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a journal in use
        journals.rmdir()
