"""Checkpoints that write what changed: a base, a journal of the rows that changed since, and a small file for each checkpoint.

The folder ``journal`` beside the checkpoints holds a base, which is a whole checkpoint, and a file of records
(``burnish.files.row_journal``). A checkpoint appends the rows of embedding tables, and of what the optimizer keeps for them,
that were written since the last one; then its own file, with everything else and the place where its records end, takes the place
of the earlier one. Until then the earlier one is what a killed process leaves. Several checkpoints, such as the latest and the
best, go to different places of one journal. A new base is written when the records have grown to ``SHARE`` of it.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.engines.row_writes import RowChanges, RowWriter, written_by_rows
from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.digest import DIGEST
from burnish.files.file_writing import file_path
from burnish.files.row_journal import JournalPlace, append_changes, start_of
from burnish.files.state_file import StateFile
from burnish.program import Program
from burnish.program.state import chosen
from burnish.training.checkpoint import EXAMPLE, JOURNAL, place_of, write_checkpoint

SHARE = 0.5
"""Bytes of records, as a share of the base's, from which on a new base is written in their place."""
_OURS = re.compile(r"(\.?base-[0-9a-f]{8}\.safetensors(\.[0-9a-f]{8}\.partial)?|rows-[0-9a-f]{8}\.journal|\.tmp[A-Za-z0-9]{6})")


def check_journal(program: Program, writer: RowWriter | None) -> RowWriter:
    """Return what says which rows a runner writes (``ProgramRunner.row_writer``).

    Raises:
        ConfigurationError: no table of the program is updated by rows, or the engine does not say which.
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
    """The journal that the checkpoints of a session go to.

    Attributes:
        folder: of the checkpoints.
        place: where the state was when rows were last noted.
    """

    folder: Path
    place: JournalPlace

    @staticmethod
    def at(path: Path, place: JournalPlace | None) -> Journal | None:
        """The journal that a checkpoint which was restored goes on in; None where it has none."""
        return None if place is None else Journal(path.parent.absolute(), place)


class ClosedTables:
    """The rows of a session that is closed, in place of its runner's.

    Args:
        row_changes: as the runner left them.
        state: of the session.
    """

    def __init__(self, row_changes: RowChanges, state: Mapping[str, np.ndarray]):
        self.row_changes, self._state = row_changes, state

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return np.take(self._state[name], rows, axis=0)


def save(
    journal: Journal | None,
    path: str | Path,
    program: Program,
    state: Mapping[str, np.ndarray],
    writer: RowWriter,
    check: Callable[[str, np.ndarray], None],
    **described: Any,
) -> Journal:
    """Write a checkpoint by what changed since the last one, or by a new base where there is none to go on from.

    Args:
        journal: as it was left by the last checkpoint of the session, or by the one that it restored.
        path: of the checkpoint.
        program, state: what is saved; entries that are made on request are made only as far as they are written.
        writer: says which rows have changed.
        check: called with names and what is about to be written.
        described: as ``write_checkpoint`` takes it.

    Returns:
        The journal to go on with.

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
    """Return whether the next records may be appended at a place, rather than a new base be written.

    Not where they have grown too long, and not where another checkpoint needs what stands after it: this session then went back
    to an earlier one.
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
    """The checkpoints in a folder that have a journal, and where each goes."""
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(CheckpointError):  # not whole, or none: it needs nothing
            if (place := place_of(path)) is not None:
                yield path.absolute(), place


def unfinished(path: Path) -> str | None:
    """Return what to say of records that stand after those of the newest checkpoint of a journal; None where there are none.

    Args:
        path: of a checkpoint.
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
    """Remove the bases and journals in the folder of checkpoints that no checkpoint refers to, and what was left half written."""
    journals = folder / JOURNAL
    if not journals.is_dir():
        return
    needed = {name for _, place in _places(folder) for name in (place.base, place.rows)}
    for path in journals.iterdir():
        if path.name not in needed and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a journal that is in use
        journals.rmdir()
