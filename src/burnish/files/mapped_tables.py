"""Embedding tables in memory-mapped files: the system reads the pages that a step touches, and writes them back at any time.

The files are a working copy; a run resumes from a checkpoint. To avoid copying all of it, ``written.log`` next to the files
records the last journal checkpoint that they matched, and, before each write, the rows that are written. The log is valid until
the system restarts, because unwritten pages are lost then.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.file_writing import OWN_FOLDER, remove_left_behind, replacing
from burnish.files.row_journal import JournalledState, JournalPlace
from burnish.program.state import Kind, LazyArrays, kind_of, read_into
from burnish.untrusted_files import UNREADABLE, read_json, read_json_file

try:
    import fcntl
except ImportError:  # Windows, where another process cannot replace a mapped file anyway
    fcntl = None  # type: ignore[assignment]

LAYOUT, LOCK, LOG = "tables.json", "lock", "written.log"
MOST_LOGGED = 1 / 8
"""The size of the log, as a share of the tables, from which it is abandoned: a resumed run then copies the checkpoint."""
_COUNTS = struct.Struct("<II")


class MappedTable(np.ndarray):
    """An array in a mapped file, which an engine uses in place instead of copying it."""


class MappedTables:
    """The tables of a session in a folder, mapped into memory.

    Args:
        folder: folder, created if missing; existing files are used again if they hold tables of the same kinds.
        kinds: dtype and shape of each state entry to keep there.

    Attributes:
        tables: the arrays, by state entry. Until ``fill`` they hold the content of the files, or zeros.

    Raises:
        ConfigurationError: the folder holds something else or the tables of another program, or another session uses it.
        CheckpointError: it cannot be written, or the disk is full.
    """

    def __init__(self, folder: str | Path, kinds: Mapping[str, Kind]):
        self.folder = Path(folder).absolute()
        self._kinds = dict(kinds)
        self._order = sorted(self._kinds)
        self._log: BinaryIO | None = None
        self._left = 0
        try:
            self.folder.mkdir(mode=OWN_FOLDER, parents=True, exist_ok=True)
            self._lock = self._locked()
            self._check_layout()
            self.tables = {name: self._mapped(number) for number, name in enumerate(self._order)}
        except OSError as error:
            raise CheckpointError(
                f"The tables cannot be kept in '{self.folder}': {error}. Choose a folder that you can write to, on a disk with "
                f"room for {self._bytes():,} bytes"
            ) from error

    def _bytes(self) -> int:
        return sum(map(self._size, range(len(self._order))))

    def _locked(self) -> BinaryIO:
        lock = open(self.folder / LOCK, "a+b")  # noqa: SIM115  # open as long as the session is
        if not _takes(lock):
            gc.collect()  # a session without references holds the folder until it is collected
            if not _takes(lock):
                lock.close()
                raise ConfigurationError(
                    f"tables: another session keeps its tables in '{self.folder}': close it, or name another folder"
                )
        self._owner = uuid.uuid4().hex.encode()
        lock.truncate(0)
        lock.write(self._owner)
        lock.flush()
        return lock

    def release(self) -> None:
        """Release the folder to other sessions; the tables stay readable until one takes it over."""
        self.forget()
        self._lock.close()

    @property
    def is_taken_over(self) -> bool:
        """True if another session has the folder now."""
        return self._lock.closed and (self.folder / LOCK).read_bytes() != self._owner

    def check_whole(self) -> None:
        """Check that no file was truncated: reading a missing part of a mapped file kills the process.

        Raises:
            CheckpointError: a file was truncated or is missing.
        """
        for number in range(len(self._order)):
            path, size = self._file(number), self._size(number)
            try:
                there = os.stat(path).st_size
            except FileNotFoundError:
                there = 0
            if there < size:
                raise CheckpointError(
                    f"The table '{path}' holds {there:,} of its {size:,} bytes: something has cut it. Let nothing else write to "
                    f"'{self.folder}', and go on from the last checkpoint (resume=True, --resume)"
                )

    def _check_layout(self) -> None:
        layout = {"tables": [[name, str(self._kinds[name][0]), list(self._kinds[name][1])] for name in self._order]}
        path = self.folder / LAYOUT
        for name in (LAYOUT, LOG):  # of a process that was killed
            remove_left_behind(self.folder / name)
        if path.exists():
            try:
                is_same = read_json_file(path) == layout
            except ValueError:
                is_same = False
            if not is_same:
                raise ConfigurationError(
                    f"tables: '{self.folder}' holds the tables of another program: name another folder, or remove this one"
                )
            return
        if others := [path.name for path in self.folder.iterdir() if path.name != LOCK]:
            raise ConfigurationError(
                f"tables: '{self.folder}' holds something else already, such as '{others[0]}': name a folder for tables alone"
            )
        with replacing(path) as partial:
            partial.write_text(json.dumps(layout), encoding="utf-8")

    def _mapped(self, number: int) -> MappedTable:
        """Return a table in its file, with all blocks allocated: on a full disk, writing a row would kill the process."""
        dtype, shape = self._kinds[self._order[number]]
        path, size = self._file(number), self._size(number)
        if not path.exists() or path.stat().st_size != size:
            (self.folder / LOG).unlink(missing_ok=True)
            with path.open("wb") as file:
                _reserve(file, size)
        return np.memmap(path, np.uint8, "r+").view(dtype).reshape(shape).view(MappedTable)

    def _size(self, number: int) -> int:
        dtype, shape = self._kinds[self._order[number]]
        return dtype.itemsize * int(np.prod(shape, dtype=np.int64))

    def _file(self, number: int) -> Path:
        return self.folder / f"table-{number:04d}.bin"

    def fill(self, arrays: Mapping[str, np.ndarray], place: JournalPlace | None = None) -> None:
        """Set the tables to a state, and stop following a checkpoint.

        Args:
            arrays: arrays by state entry; lazy arrays need not fit into memory.
            place: place of ``arrays`` in a journal. If the tables matched it, only rows written since are read.
        """
        written = None if place is None else self._written_since(place)
        self.forget()
        (self.folder / LOG).unlink(missing_ok=True)
        if written is not None and isinstance(arrays, JournalledState):
            for name, rows in written.items():
                arrays.read_rows_into(name, rows, self.tables[name])
            return
        for number, name in enumerate(self._order):
            table = self.tables[name].view(np.ndarray)
            constant = arrays.constant(name) if isinstance(arrays, LazyArrays) else None
            is_zero = self._emptied(number)
            if constant is not None and is_zero and not np.any(np.frombuffer(constant.tobytes(), np.uint8)):
                continue
            if isinstance(arrays, LazyArrays):
                arrays.read_into(name, table, is_zero)
            else:
                read_into(arrays, name, table)

    def _emptied(self, number: int) -> bool:
        """Fill a file with zeros without writing them; return False if the system cannot."""
        path = self._file(number)
        size = path.stat().st_size
        if os.name == "nt":  # a mapped file cannot be truncated there
            return False
        with path.open("r+b") as file:
            file.truncate(0)
            _reserve(file, size)
        return True

    def agrees_with(self, place: JournalPlace) -> bool:
        """True if the tables matched a checkpoint, except for known rows."""
        return self._written_since(place) is not None

    def follow(self, place: JournalPlace) -> None:
        """Record that the tables match a checkpoint; from then on ``note`` records the rows that are written."""
        self.forget()
        boot = _boot()
        if boot is None:
            return
        header = json.dumps({"place": place.as_json(), "boot": boot}).encode()
        with replacing(self.folder / LOG) as partial:
            partial.write_bytes(struct.pack("<I", len(header)) + header)
        self._log = open(self.folder / LOG, "ab", buffering=0)  # noqa: SIM115  # as long as the tables follow
        self._left = int(MOST_LOGGED * self._bytes())

    def note(self, entries: tuple[str, ...], rows: np.ndarray) -> None:
        """Record that rows of some entries are about to be written."""
        if self._log is None:
            return
        numbers = [self._order.index(name) for name in entries if name in self.tables]
        record = _COUNTS.pack(len(numbers), rows.size) + np.array(numbers, np.uint32).tobytes() + rows.tobytes()
        self._left -= len(record)
        if self._left < 0:
            self.forget()
            (self.folder / LOG).unlink(missing_ok=True)
        else:
            self._log.write(record)

    def forget(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _written_since(self, place: JournalPlace) -> dict[str, np.ndarray] | None:
        """Return the rows written since the tables matched a checkpoint; None if unknown."""
        with contextlib.suppress(*UNREADABLE):
            content = (self.folder / LOG).read_bytes()
            (size,) = struct.unpack_from("<I", content)
            header = read_json(content[4 : 4 + size])
            if header["place"] != place.as_json() or header["boot"] != _boot() or _boot() is None:
                return None
            written: dict[str, list[np.ndarray]] = {}
            for numbers, rows in _records(content, 4 + size):
                for number in numbers:
                    written.setdefault(self._order[number], []).append(rows)
            return {name: np.unique(np.concatenate(parts)) for name, parts in written.items()}
        return None

    def instead(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return a state with the tables of this folder in place of its own, without making any."""
        return _WithTables(state, self.tables)


def _takes(lock: BinaryIO) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _records(content: bytes, offset: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the records of a log; nothing was written yet for a record that was cut short."""
    while offset + _COUNTS.size <= len(content):
        entries, rows = _COUNTS.unpack_from(content, offset)
        begin = offset + _COUNTS.size
        offset = begin + 4 * entries + 8 * rows
        if offset > len(content):
            return
        numbers = np.frombuffer(content, np.uint32, entries, begin).tolist()
        yield numbers, np.frombuffer(content, np.int64, rows, begin + 4 * entries)


class _WithTables(LazyArrays):
    def __init__(self, state: Mapping[str, np.ndarray], tables: Mapping[str, MappedTable]):
        self._state, self._tables = state, tables

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tables[name] if name in self._tables else self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def kind(self, name: str) -> Kind:
        return kind_of(self._state, name)


def _reserve(file: BinaryIO, size: int) -> None:
    """Give a file its size, with allocated blocks of zeros.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    if shutil.disk_usage(os.path.dirname(os.path.abspath(file.name))).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.truncate(size)


def _boot() -> str | None:
    """Return an identifier of the current system start; None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def adopted(array: np.ndarray) -> np.ndarray | None:
    """Return a mapped table as a plain array of the same memory; None for an array that must be copied."""
    return array.view(np.ndarray) if isinstance(array, MappedTable) else None
