"""IDX files: every dtype, compressed or not; what is wrong with a file is named."""

import gzip
import struct

import numpy as np
import pytest

from burnish.data import read_idx
from burnish.errors import DataError

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("shape", [(3, 2, 4), (5,), (0, 2), ()])
@pytest.mark.parametrize("dtype", CODES)
def test_an_array_comes_back(tmp_path, dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    path = tmp_path / "array-idx"
    path.write_bytes(idx_bytes(array, CODES[dtype]))
    read = read_idx(path)
    assert read.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(read, array)


def test_a_compressed_file_is_read(tmp_path):
    array = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(array, 0x08)))
    np.testing.assert_array_equal(read_idx(path), array)


GOOD = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3), 0x08)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no IDX file: it begins with nothing"),
        (b"\x89PNG....", "is no IDX file: it begins with 89 50 4e 47"),
        (b"\0\0\x07\x01", "is no IDX file: it begins with 00 00 07 01"),
        (GOOD[:9], "is truncated: it ends before the extents of its 2 axes"),
        (GOOD[:-1], r"holds 5 bytes of elements, and its extents \[2, 3\] of uint8 ask for 6"),
        (GOOD + b"x", "holds more than 6 bytes of elements"),
        (struct.pack(">HBB2I", 0, 8, 2, 2**31, 2**31) + b"abc", "holds 3 bytes of elements"),
        (gzip.compress(GOOD, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, content, message):
    path = tmp_path / "wrong"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        read_idx(tmp_path / "none")
