"""Tensors that need no memory, because the file that they are read from holds them.

A program keeps the weights that training starts from, beside the state that it trains: in memory, they would be there twice. A
model's file, and those with its external data, stay open, so that they may be moved, replaced or removed; only writing over one
in place is noticed, and refused.
"""

from __future__ import annotations

import math
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError


class SourceFile:
    """A file that is kept open to be read again, as long as nobody writes to it.

    Args:
        path: what it is called.
        file: the file, open for reading.
    """

    def __init__(self, path: Path, file: BinaryIO):
        self.path = path
        self._descriptor = os.dup(file.fileno())
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._opened_as = self._state()

    @classmethod
    def of(cls, path: Path, file: BinaryIO) -> SourceFile | None:
        """The file, if it is one that can be read again; None on a system where an open file cannot be replaced."""
        if not hasattr(os, "preadv") or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        try:
            return cls(path, file)
        except OSError:  # too many are open
            return None

    def is_unchanged(self) -> bool:
        """Whether nobody has written to the file since it was opened."""
        return self._state() == self._opened_as

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer of bytes from a place in the file on; return whether they are those that the file was opened with."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                return False
            buffer, offset = buffer[count:], offset + count
        return self.is_unchanged()

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(eq=False)
class Elements:
    """The elements of a tensor: those that are in memory, or read from the file.

    Attributes:
        array: the elements, as the file has them; None to read them when they are asked for.
        shape, dtype, name: of the tensor; each element is a whole number of bytes.
        file: where it is read.
        offset: of its first byte in the file.
    """

    array: np.ndarray | None
    shape: tuple[int, ...]
    dtype: ir.DataType
    name: str | None
    file: SourceFile
    offset: int

    def __call__(self) -> ir.Tensor:
        array = self.array
        if array is None:
            array = self.read()
            array.flags.writeable = False
        return ir.Tensor(array, self.dtype, name=self.name)

    def read(self) -> np.ndarray:
        """Return a new array of what the file holds."""
        try:
            array = np.empty(self.shape, self.dtype.numpy())
        except MemoryError as error:
            raise self._unreadable(error) from error
        self._fill(array.reshape(-1), self.offset)
        return array

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """The elements in flat parts of so many bytes, of which there is one at a time."""
        dtype = self.dtype.numpy()
        offset, left = self.offset, math.prod(self.shape)
        buffer = np.empty(max(1, size // dtype.itemsize), dtype)
        while left:
            part = buffer[:left]
            self._fill(part, offset)
            yield part
            offset, left = offset + part.nbytes, left - part.size

    def _fill(self, flat: np.ndarray, offset: int) -> None:
        try:
            is_same = self.file.read_into(flat.view(np.uint8).data, offset)
        except (OSError, MemoryError) as error:
            raise self._unreadable(error) from error
        if not is_same:
            raise ModelError(
                f"the tensor '{self.name}' is to be read from '{self.file.path}', and that file has been written to since "
                "the model was loaded: load or compile the model again, and write other models to files of their own"
            )

    def _unreadable(self, error: Exception) -> ModelError:
        return ModelError(
            f"the tensor '{self.name}' cannot be read from '{self.file.path}': {error}. Check the disk, and that there is "
            "memory for it"
        )


class FileTensor(ir.LazyTensor):
    """A tensor of a file, which is read there when it is asked for and its elements are not in memory."""

    def __init__(self, elements: Elements):
        self._elements = elements
        super().__init__(elements, elements.dtype, ir.Shape(elements.shape), name=elements.name)

    def copy(self) -> FileTensor:
        """Another tensor of the same elements, which keeps those in memory that are there, whatever this one lets go."""
        return FileTensor(replace(self._elements, name=self.name))

    def own_array(self) -> np.ndarray:
        """Return its elements in an array that no one else has.

        Raises:
            ModelError: they are to be read, and the file cannot be, or has been written to.
        """
        elements = self._elements
        return elements.read() if elements.array is None else elements.array.copy()

    def parts(self, size: int) -> Iterator[np.ndarray]:
        """Its elements in flat parts of so many bytes, which the next part may lie over.

        Raises:
            ModelError: as ``own_array``.
        """
        elements = self._elements
        if elements.array is None:
            yield from elements.parts(size)
            return
        flat = elements.array.reshape(-1)
        step = max(1, size // flat.itemsize)
        for begin in range(0, flat.size, step):
            yield flat[begin : begin + step]

    def release(self) -> None:
        """Let the memory go, where the file is as it was."""
        if self._elements.file.is_unchanged():
            self._elements.array = None
