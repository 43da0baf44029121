"""The file of a state: a safetensors file with a text header, written and read one array at a time.

The format (https://github.com/huggingface/safetensors): eight bytes with the size of the header, the header in JSON, then the
arrays, little-endian and without gaps. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from burnish.errors import CheckpointError
from burnish.files.digest import BLANK, DIGEST, FORMAT_VERSION, agrees, blank_place, digest_text
from burnish.files.file_writing import replacing
from burnish.program.state import BLOCK, Arrays, Kind, LazyArrays, blocks, kind_of, write_blocks
from burnish.transfer_progress import Transfer
from burnish.untrusted_files import UNREADABLE, read_json

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
ALIGNMENT = 8
"""The header's size is a multiple of this number of bytes, as safetensors writes it."""
FOR_OTHERS = {"format": "pt", "burnish.version": str(FORMAT_VERSION)}
"""The text header of files for other libraries. Its version shows that a digest is expected, even if the digest is damaged."""


def write_state_file(
    path: Path,
    state: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    check: Callable[[str, np.ndarray], None] | None = None,
) -> None:
    """Write arrays and a text header with a digest into one safetensors file, atomically and one array at a time.

    Args:
        path: the file.
        state: arrays by name; lazy arrays are read once.
        metadata: other entries of the text header.
        check: a function that is called with each name and flat parts of its array before they are written; it may raise to stop.

    Raises:
        CheckpointError: the file cannot be written; an earlier one is unchanged.
    """
    kinds = {name: kind_of(state, name) for name in state}
    offsets = _offsets(kinds)
    transfer = Transfer(f"writing '{path}'", sum(map(_size, kinds.values())))
    header = _header(kinds, offsets, {DIGEST: BLANK, **metadata})
    total = hashlib.sha256(header)
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header)
        for name in offsets:
            for block in blocks(state[name]):
                if check is not None:
                    check(name, block)
                content = encoded(block)
                total.update(content)
                file.write(content)
                transfer.advance(block.nbytes)
        file.seek(blank_place(header))
        file.write(digest_text(total).encode())


def encoded(block: np.ndarray) -> memoryview:
    """Return the bytes of a flat array, little-endian."""
    return _little_endian(block).view(np.uint8).data


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array.byteswap() if sys.byteorder == "big" else array


def _size(kind: Kind) -> int:
    dtype, shape = kind
    return dtype.itemsize * math.prod(shape)


def _offsets(kinds: Mapping[str, Kind]) -> dict[str, int]:
    """Return the offset of each array after the header; arrays of large elements come first, so that all are aligned."""
    offsets, end = {}, 0
    for name in sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name)):
        offsets[name] = end
        end += _size(kinds[name])
    return offsets


def _header(kinds: Mapping[str, Kind], offsets: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {METADATA: dict(metadata)}
    for name, begin in offsets.items():
        dtype, shape = kinds[name]
        if dtype not in NAMES:
            raise CheckpointError(f"'{name}' is of {dtype}, which a safetensors file cannot hold")
        described[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, begin + _size(kinds[name])]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


class StateFile(LazyArrays):
    """An open safetensors file; each array is read when needed.

    Args:
        path: the file.
        kind: expected kind of file, for messages: ``checkpoint``.

    Attributes:
        metadata: the text header.

    Raises:
        CheckpointError: the file is missing, truncated, or not a safetensors file; also on reading an array.
    """

    def __init__(self, path: Path, kind: str):
        if not os.path.isfile(path):
            raise CheckpointError(f"There is no {kind} '{path}': check the path, or start without it")
        self._path, self._called = path, kind
        try:
            with safe_open(path, framework="np") as checked:  # checks that sizes and offsets fit each other and the file's size
                self.metadata = dict(checked.metadata() or {})
            self._file = path.open("rb")
            (size,) = struct.unpack("<Q", self._file.read(8))
            described = read_json(self._file.read(size))
            described.pop(METADATA, None)
            self._begin = 8 + size
            self._kinds = {name: (DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))) for name, entry in described.items()}
            self._offsets = {name: int(entry["data_offsets"][0]) for name, entry in described.items()}
        except (SafetensorError, *UNREADABLE) as error:
            raise self._damaged(error) from error

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape = self._kinds[name]
        array = np.empty(shape, dtype)
        self._read_into(array.reshape(-1).view(np.uint8).data, self._offsets[name])
        return _little_endian(array)

    def read_into(self, name: str, target: np.ndarray, is_zero: bool = False) -> None:
        write_blocks(target, self._parts(name), is_zero)

    def _parts(self, name: str) -> Iterator[np.ndarray]:
        """Yield an array in flat parts; each one overwrites the previous."""
        dtype, _ = self._kinds[name]
        offset, left = self._offsets[name], _size(self._kinds[name])
        buffer = np.empty(max(1, BLOCK // dtype.itemsize), dtype)
        while left:
            part = buffer[: left // dtype.itemsize]
            self._read_into(part.view(np.uint8).data, offset)
            yield _little_endian(part)
            offset, left = offset + part.nbytes, left - part.nbytes

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return rows of an array without reading the others."""
        dtype, shape = self._kinds[name]
        array = np.empty((rows.size, *shape[1:]), dtype)
        size = dtype.itemsize * math.prod(shape[1:])
        content = array.reshape(-1).view(np.uint8).data
        for place, row in enumerate(rows.tolist()):
            self._read_into(content[place * size : (place + 1) * size], self._offsets[name] + row * size)
        return _little_endian(array)

    def _read_into(self, content: memoryview, offset: int) -> None:
        try:
            self._file.seek(self._begin + offset)
            if self._file.readinto(content) != len(content):
                raise OSError("it ends too early")
        except OSError as error:
            raise self._damaged(error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def kind(self, name: str) -> Kind:
        return self._kinds[name]

    def place(self, name: str) -> tuple[int, int]:
        """Return the offset of an array's bytes in the file, and their number."""
        return self._begin + self._offsets[name], _size(self._kinds[name])

    def check_digest(self) -> None:
        """Read the whole file and raise CheckpointError if it was changed; other libraries' files have no digest."""
        digest = self.metadata.get(DIGEST)
        if digest is None and not any("burnish" in text for entry in self.metadata.items() for text in entry):
            return
        try:
            self._file.seek(0)
            is_same = agrees(digest, self._file.read(self._begin), self._blocks())
        except OSError as error:
            raise self._damaged(error) from error
        if not is_same:
            raise self._damaged("it has changed since it was written")

    def _blocks(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(BLOCK))
        transfer = Transfer(f"checking '{self._path}'", sum(map(_size, self._kinds.values())))
        while count := self._file.readinto(buffer):
            yield buffer[:count]
            transfer.advance(count)

    def _damaged(self, error: Exception | str) -> CheckpointError:
        return CheckpointError(
            f"'{self._path}' is not a whole {self._called}: it is truncated, damaged or another kind of file ({error}). "
            "Use an earlier one, or start without it"
        )


def read_state_file(path: Path, kind: str, is_checked: bool = False) -> tuple[Arrays, dict[str, str]]:
    """Read a safetensors file: arrays by name, and its text header. Sizes are checked before memory is taken.

    Args:
        path: the file.
        kind: expected kind of file, for the message: ``checkpoint``.
        is_checked: True if the digest of the file was verified already and need not be checked again.

    Raises:
        CheckpointError: the file is missing, truncated, not a safetensors file, or has changed since it was written.
    """
    with StateFile(path, kind) as file:
        if not is_checked:
            file.check_digest()
        return dict(file), file.metadata
