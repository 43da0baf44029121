"""Pages that are kept: tensors of a step get the memory of the step before, instead of fresh pages from the operating system.

glibc gives every large block back as soon as it is free, and a fresh page costs as much as filling it: a quarter to a half of a
step. PyTorch's CPU tensors come from glibc, so that its own settings are what is changed, for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import sys

# From malloc.h. No block is mapped on its own, and what is free at the top of the heap is not given back.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 2**31 - 1


@functools.cache
def keep_pages() -> bool:
    """Tell the C library to keep its pages; returns whether it was told (glibc alone takes it)."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(M_MMAP_MAX, 0)) and bool(library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
