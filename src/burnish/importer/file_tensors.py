"""Weights whose memory can be let go, because the file that they were read from holds them still.

A program keeps the weights that training starts from, beside the state that it trains: in memory, they would be there twice. A
model's file stays open, so that it may be moved, replaced or removed; only writing over it in place is noticed, and refused.
"""

from __future__ import annotations

import os
import stat
import weakref
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
        self._found = self._state()

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
        return self._state() == self._found

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill a buffer of bytes from a place in the file on; tells whether they are those that the file was opened with."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                return False
            buffer, offset = buffer[count:], offset + count
        return self.is_unchanged()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


class _Elements:
    """The elements of a tensor: those that are in memory, or read from the file."""

    def __init__(self, array: np.ndarray, dtype: ir.DataType, name: str | None, file: SourceFile, offset: int):
        self.array: np.ndarray | None = array
        self.file = file
        self._dtype, self._name, self._offset = dtype, name, offset
        self._shape, self._element = array.shape, array.dtype

    def __call__(self) -> ir.Tensor:
        array = self.array
        if array is None:
            array = np.empty(self._shape, self._element)
            if not self.file.read_into(array.reshape(-1).view(np.uint8).data, self._offset):
                raise ModelError(
                    f"the weight '{self._name}' is to be read again, and '{self.file.path}' has been written to since the model "
                    "was loaded: load or compile the model again, and write other models to files of their own"
                )
            array.flags.writeable = False
        return ir.Tensor(array, self._dtype, name=self._name)


class FileTensor(ir.LazyTensor):
    """A tensor that was read from a file, and is read there again when it is asked for after its memory was let go.

    Args:
        array: its elements, as the file has them.
        dtype, name: of the tensor.
        file: where it was read.
        offset: of its first byte in the file.
    """

    def __init__(self, array: np.ndarray, dtype: ir.DataType, name: str | None, file: SourceFile, offset: int):
        self._elements = _Elements(array, dtype, name, file, offset)
        super().__init__(self._elements, dtype, ir.Shape(array.shape), name=name)

    def release(self) -> None:
        """Let the memory go, where the file is as it was."""
        if self._elements.file.is_unchanged():
            self._elements.array = None
