"""The file of a journal: the table rows that changed from one checkpoint to the next, as a sequence of records.

Records are only appended. A record is ``MAGIC``, a checksum, the sizes of its parts, a JSON header with the entries and their
numbers of rows, the indices, and the rows, little-endian. The checksum (CRC-32) continues from that of the previous record, and
the first one from the name of the base, so that records cannot be mixed up.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from burnish.errors import CheckpointError
from burnish.files.file_writing import flush_folder
from burnish.files.state_file import StateFile, encoded
from burnish.program.state import BLOCK, Kind, LazyArrays, blocks
from burnish.untrusted_files import UNREADABLE, read_json

MAGIC = b"BNRJ"
_PREFIX = struct.Struct("<4sIQQ")
_NAME = re.compile(r"base-[0-9a-f]{8}\.safetensors")
ROWS_AT_ONCE = 1 << 16
"""The number of rows that are read from a table at a time."""

Changes = Mapping[tuple[str, ...], np.ndarray]
"""State entries -> their changed rows: int64, ascending, unique."""


@dataclass(frozen=True)
class JournalEnd:
    """A place between two records of a journal.

    Attributes:
        size: number of bytes before it.
        checksum: checksum of the record before it.
    """

    size: int
    checksum: int


@dataclass(frozen=True)
class JournalPlace:
    """The part of a checkpoint outside its own file: a base, and the records of its journal up to an end.

    Attributes:
        base: file name of the base, a whole checkpoint in the folder of the journal.
        base_digest: digest of that file.
        end: end of the records of this checkpoint.
    """

    base: str
    base_digest: str
    end: JournalEnd

    @property
    def rows(self) -> str:
        """The name of the file with the records, next to the base."""
        return rows_file(self.base)

    def as_json(self) -> str:
        """The place as JSON, for the header of a checkpoint."""
        end = {"size": self.end.size, "checksum": f"{self.end.checksum:08x}"}
        return json.dumps({"base": self.base, "digest": self.base_digest, "end": end})

    @staticmethod
    def from_json(text: str) -> JournalPlace:
        """Read a place.

        Raises:
            ValueError, KeyError, TypeError: the text is not a place, or names a file outside the journal's folder.
        """
        described = read_json(text)
        if not _NAME.fullmatch(described["base"]):
            raise ValueError(f"no base is called {described['base']!r}")
        end = JournalEnd(int(described["end"]["size"]), int(described["end"]["checksum"], 16))
        return JournalPlace(described["base"], str(described["digest"]), end)


def rows_file(base: str) -> str:
    """Return the name of the records file of a base."""
    return base.replace("base-", "rows-").replace(".safetensors", ".journal")


def start_of(base: str) -> JournalEnd:
    """Return the place before the first record of a base's journal."""
    return JournalEnd(0, zlib.crc32(base.encode()))


def append_changes(
    path: Path,
    end: JournalEnd,
    changes: Changes,
    rows_of: Callable[[str, np.ndarray], np.ndarray],
    check: Callable[[str, np.ndarray], None],
) -> JournalEnd:
    """Append a record and wait until it is on the disk. Anything after ``end``, from a killed process, is cut off.

    Args:
        path: the file; created if ``end`` is its start.
        end: end of the previous checkpoint's last record.
        changes: the rows to write.
        rows_of: a function that returns rows of a state entry, by its name.
        check: a function that is called with each name and parts of its rows before they are written; it may raise to stop.

    Returns:
        The end of the record.

    Raises:
        CheckpointError: the file cannot be written, or is shorter than ``end``; the part before ``end`` is unchanged.
    """
    groups = [{"entries": list(entries), "rows": int(rows.size)} for entries, rows in changes.items()]
    header = json.dumps({"groups": groups}, ensure_ascii=False).encode()
    checksum = zlib.crc32(header, end.checksum)
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            if file.seek(0, os.SEEK_END) < end.size:
                raise OSError(f"it has {file.tell():,} bytes, and {end.size:,} were written")
            file.truncate(end.size)
            file.seek(end.size + _PREFIX.size)
            file.write(header)
            for content in _contents(changes, rows_of, check):
                checksum = zlib.crc32(content, checksum)
                file.write(content)
            size = file.tell()
            file.seek(end.size)
            file.write(_PREFIX.pack(MAGIC, checksum, len(header), size - end.size - _PREFIX.size - len(header)))
            file.flush()
            os.fsync(file.fileno())
        if not end.size:
            flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"The journal '{path}' could not be written: {error}. The last checkpoint is untouched. Free space on the disk, or "
            "write a whole checkpoint, without journal"
        ) from error
    return JournalEnd(size, checksum)


def _contents(
    changes: Changes, rows_of: Callable[[str, np.ndarray], np.ndarray], check: Callable[[str, np.ndarray], None]
) -> Iterator[memoryview]:
    for entries, rows in changes.items():
        yield from map(encoded, blocks(rows))
        for name in entries:
            for begin in range(0, rows.size, ROWS_AT_ONCE):
                for block in blocks(rows_of(name, rows[begin : begin + ROWS_AT_ONCE])):
                    check(name, block)
                    yield encoded(block)


@dataclass(frozen=True)
class _Place:
    """The place of an entry's rows in a record: their number, and offsets of the indices and of the rows."""

    count: int
    indices: int
    rows: int


class RowJournal:
    """The records of a journal. They are read once to be checked, and their rows are read again when needed.

    Args:
        path: the file.
        base: name of the base that it belongs to.
        end: end of the records to read.
        kinds: dtype and shape of each entry of the base.

    Raises:
        CheckpointError: the file is missing or too short, or its records were changed.
    """

    def __init__(self, path: Path, base: str, end: JournalEnd, kinds: Callable[[str], Kind]):
        self._path, self._kinds = path, kinds
        self._places: dict[str, list[_Place]] = {}
        self._file: BufferedReader | None = None
        if end.size == 0:
            return
        try:
            self._file = path.open("rb")
            self._scan(self._file, start_of(base), end)
        except UNREADABLE as error:
            self.close()
            raise self._damaged(error) from error
        except BaseException:
            self.close()
            raise

    def _scan(self, file: BufferedReader, start: JournalEnd, end: JournalEnd) -> None:
        size = os.fstat(file.fileno()).st_size
        if size < end.size:
            raise ValueError(f"it has {size:,} bytes in place of {end.size:,}")
        offset, checksum = start.size, start.checksum
        while offset < end.size:
            file.seek(offset)
            magic, expected, header_size, content_size = _PREFIX.unpack(file.read(_PREFIX.size))
            begin = offset + _PREFIX.size + header_size
            if magic != MAGIC or begin + content_size > end.size:
                raise ValueError(f"at byte {offset:,} begins no record")
            header = file.read(header_size)
            checksum = zlib.crc32(header, checksum)
            for part in _parts(file, content_size):
                checksum = zlib.crc32(part, checksum)
            if checksum != expected:
                raise ValueError(f"the record at byte {offset:,} is not the one that was written")
            if self._note(read_json(header), begin) != begin + content_size:
                raise ValueError(f"the record at byte {offset:,} has another size than its rows")
            offset = begin + content_size
        if JournalEnd(offset, checksum) != end:
            raise ValueError("its records are not those that were written")

    def _note(self, header: dict[str, Any], offset: int) -> int:
        """Record the offsets of a record's rows; return their end."""
        for group in header["groups"]:
            count, indices = int(group["rows"]), offset
            offset += 8 * count
            for name in group["entries"]:
                dtype, shape = self._kinds(str(name))
                self._places.setdefault(name, []).append(_Place(count, indices, offset))
                offset += count * dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        return offset

    def apply(self, name: str, table: np.ndarray, among: np.ndarray | None = None) -> None:
        """Overwrite the rows of a base's entry with the changed ones.

        Args:
            name: name of the entry.
            table: the array to change.
            among: the rows to write, ascending; None for all that changed.

        Raises:
            CheckpointError: the rows cannot be read, or the table does not have them.
        """
        for place in self._places.get(name, ()):
            rows = self._array(place.indices, (place.count,), np.dtype(np.int64))
            if rows.size and not 0 <= rows.min() <= rows.max() < len(table):
                raise self._damaged(ValueError(f"'{name}' has {len(table):,} rows, and a record names others"))
            for begin in range(0, place.count, ROWS_AT_ONCE):
                part = rows[begin : begin + ROWS_AT_ONCE]
                chosen = np.full(part.size, True) if among is None else np.isin(part, among)
                if not chosen.any():
                    continue
                row_bytes = table.dtype.itemsize * int(np.prod(table.shape[1:], dtype=np.int64))
                content = self._array(place.rows + begin * row_bytes, (part.size, *table.shape[1:]), table.dtype)
                table[part[chosen]] = content[chosen]

    def _array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        assert self._file is not None
        array = np.empty(shape, dtype)
        try:
            self._file.seek(offset)
            if self._file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise OSError("it ends too early")
        except OSError as error:
            raise self._damaged(error) from error
        return array.byteswap() if sys.byteorder == "big" else array

    def _damaged(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"The journal '{self._path}' is not whole: {error}. It belongs to the checkpoints beside its folder: keep them "
            "together, or use an earlier checkpoint"
        )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _parts(file: BufferedReader, size: int) -> Iterator[bytes]:
    while size:
        part = file.read(min(size, BLOCK))
        if not part:
            raise ValueError("it ends too early")
        yield part
        size -= len(part)


class JournalledState(LazyArrays):
    """The state of a checkpoint with a journal: its own file, and tables made from the base and the changed rows.

    Args:
        head: the checkpoint's own file.
        base: the whole checkpoint that the journal starts from.
        journal: the rows that changed since.
    """

    def __init__(self, head: StateFile, base: StateFile, journal: RowJournal):
        self._head, self._base, self._journal = head, base, journal

    def __enter__(self) -> JournalledState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._journal.close()

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._head:
            return self._head[name]
        array = self._base[name]
        self._journal.apply(name, array)
        return array

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        if name in self._head:
            self._head.read_into(name, target, is_zero)
        else:
            self._base.read_into(name, target, is_zero)
            self._journal.apply(name, target)

    def read_rows_into(self, name: str, rows: np.ndarray, table: np.ndarray) -> None:
        """Write rows of an array (int64, ascending, unique) into a table of the same dtype and shape."""
        for begin in range(0, rows.size, ROWS_AT_ONCE):
            part = rows[begin : begin + ROWS_AT_ONCE]
            table[part] = self._base.rows(name, part)
        self._journal.apply(name, table, rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def kind(self, name: str) -> Kind:
        return self._head.kind(name) if name in self._head else self._base.kind(name)
