"""IDX files, the format of MNIST: a single array.

Two zero bytes, a byte for the dtype, one for the number of axes, each extent as a big-endian 32-bit integer, then the elements in
row-major order, also big-endian (Yann LeCun, "The MNIST database of handwritten digits").
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np

from burnish.errors import DataError
from burnish.untrusted_files import check_regular, memory_excess

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Dtype byte in the file -> dtype of the elements."""
GZIP = b"\x1f\x8b"
"""First bytes of a gzip file."""


def read_idx(path: str | Path) -> np.ndarray:
    """Return the array of an IDX file, in native byte order; gzip files are decompressed.

    Args:
        path: ``train-images-idx3-ubyte``, ``t10k-labels-idx1-ubyte.gz``, or another.

    Raises:
        DataError: the file is missing, truncated, too long, or not an IDX file.
    """
    source = Path(path)
    try:
        check_regular(source)
        with source.open("rb") as raw:
            is_compressed = raw.read(2) == GZIP
            raw.seek(0)
            return _read(gzip.GzipFile(fileobj=raw) if is_compressed else raw, source)
    except FileNotFoundError as error:
        raise DataError(f"there is no file '{source}': check the path") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{source}' cannot be read: {error}. Fetch it again") from error


def _read(file: gzip.GzipFile | BufferedReader, source: Path) -> np.ndarray:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in DTYPES:
        raise DataError(
            f"'{source}' is no IDX file: it begins with {head.hex(' ') or 'nothing'}, and one begins with two zero bytes and one "
            f"for its dtype, {', '.join(f'{code:02x}' for code in DTYPES)}"
        )
    extents_read = file.read(4 * head[3])
    if len(extents_read) < 4 * head[3]:
        raise DataError(f"'{source}' is truncated: it ends before the extents of its {head[3]} axes. Fetch it again")
    extents = struct.unpack(f">{head[3]}I", extents_read)
    dtype = np.dtype(DTYPES[head[2]])
    expected = math.prod(extents) * dtype.itemsize
    # Read in pieces, so that a file with false extents cannot allocate more memory than its size.
    elements = bytearray()
    while len(elements) <= expected and (piece := file.read(min(1 << 20, expected + 1 - len(elements)))):
        elements += piece
        excess = memory_excess(len(elements), source.stat().st_size)
        if excess is not None:
            raise DataError(f"'{source}' is too large: {excess}")
    if len(elements) != expected:
        found = f"more than {expected}" if len(elements) > expected else str(len(elements))
        raise DataError(
            f"'{source}' holds {found} bytes of elements, and its extents {list(extents)} of {dtype.name} ask for {expected}. "
            "Fetch it again"
        )
    return np.frombuffer(bytes(elements), dtype).reshape(extents).astype(dtype.newbyteorder("="))
