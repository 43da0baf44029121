"""Arrays in files, read row by row: access to a truncated memory map would crash the process."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import DataError

SMALL_ROW = 16 << 10
"""Below this many bytes per row, a system call for each row costs at least as much as copying it from memory."""
HELD = 256 << 20
"""Arrays of small rows are read whole up to this many bytes."""


class FileRows:
    """An array in a file, indexed by row numbers along axis 0. It is safe to read from several threads.

    Rows of less than 16 KiB in an array of up to 256 MiB are read once and kept.

    Args:
        path: the file.
        dtype, shape: of the array, in C order, with at least one axis.
        offset: start of the array in the file, in bytes.
        writable: True to also write rows; then nothing is kept in memory.

    Raises:
        DataError: the file cannot be opened, or is shorter than the array.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, writable: bool = False):
        self.path, self.dtype, self.shape, self._offset, self._writable = path, dtype, shape, offset, writable
        self._row = dtype.itemsize * math.prod(shape[1:])
        self._open()

    def _open(self) -> None:
        self._lock, self._held = threading.Lock(), None
        try:
            self._file = open(self.path, "r+b" if self._writable else "rb", buffering=0)  # noqa: SIM115  # as long as it is read
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more ({error.strerror or error}); put it back") from error
        if not self._writable and self._row < SMALL_ROW and self._row * len(self) <= HELD:
            self._held = self._read(np.arange(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_held", "_file")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return rows, copied.

        Args:
            indices: int64 [n].

        Raises:
            DataError: the file was truncated, or its disk fails.
            IndexError: there is no such row.
        """
        if self._held is not None:
            if os.fstat(self._file.fileno()).st_size < self._end:
                raise self._cut()
            return np.asarray(self._held[indices])
        indices = np.asarray(indices, np.int64)
        if indices.size and not -len(self) <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"{self.path}: no row {indices.max()}; it has {len(self)}")
        return self._read(np.where(indices < 0, indices + len(self), indices))

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write rows of the array's dtype and shape, starting at row ``start``.

        Raises:
            DataError: the disk is full or fails.
        """
        try:
            with self._lock:
                self._file.seek(self._offset + start * self._row)
                memory = _bytes_of(np.ascontiguousarray(rows))
                while memory:
                    memory = memory[self._file.write(memory) :]
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error.strerror or error}); make room on its disk") from error

    @property
    def _end(self) -> int:
        return self._offset + self._row * len(self)

    def _read(self, indices: np.ndarray) -> np.ndarray:
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        memory, size = _bytes_of(rows), self._row
        if not memory:
            return rows
        # Consecutive rows take a single read.
        is_run = indices[-1] - indices[0] == len(indices) - 1 and bool((np.diff(indices) == 1).all())
        places = [int(indices[0])] if is_run else indices.tolist()
        length = len(memory) if is_run else size
        file, read_at = self._file.fileno(), getattr(os, "preadv", None)
        try:
            for number, place in enumerate(places):
                part, position = memory[number * length : (number + 1) * length], self._offset + place * size
                if read_at is None or read_at(file, (part,), position) != length:
                    self._fill(part, position)
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read any more ({error.strerror or error}); put it on a disk that is whole, and go on"
            ) from error
        return rows

    def _fill(self, memory: memoryview, position: int) -> None:
        while memory:
            count = self._read_at(memory, position)
            if not count:
                raise self._cut()
            memory, position = memory[count:], position + count

    def _read_at(self, memory: memoryview, position: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), (memory,), position)
        with self._lock:
            self._file.seek(position)
            return self._file.readinto(memory) or 0

    def _cut(self) -> DataError:
        there = os.fstat(self._file.fileno()).st_size
        return DataError(
            f"{self.path}: holds {there:,} of the {self._end:,} bytes that it had when it was opened: something has cut "
            "it; put the whole file back, and go on with the run (resume=True, --resume)"
        )


def file_rows(array: np.ndarray) -> FileRows | None:
    """Return a memory-mapped array as rows of its file; None for other arrays or another order than C.

    Raises:
        DataError: the file is gone.
    """
    mapped: Any = array
    while isinstance(mapped, np.ndarray) and isinstance(mapped.base, np.ndarray):
        mapped = mapped.base
    if not isinstance(mapped, np.memmap) or not mapped.filename or mapped.mode == "c":
        return None
    if not array.flags.c_contiguous or not array.ndim or not array.size:
        return None
    begin = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    return FileRows(mapped.filename, array.dtype, array.shape, mapped.offset + begin)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
