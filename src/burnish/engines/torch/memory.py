"""Pages that are kept: tensors of a step get the memory of the step before, instead of fresh pages from the operating system.

glibc gives every large block back as soon as it is free, and a fresh page costs as much as filling it: a quarter to a half of a
step. Where the engine's own kernels are there, large CPU tensors come from an allocator of theirs (``kernels/allocator.cpp``);
elsewhere glibc is told to keep its heap. Both hold for the whole process.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

from burnish.engines.torch import kernels

# From malloc.h. No block is mapped on its own, and what is free at the top of the heap is not given back.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 2**31 - 1


@functools.cache
def keep_pages() -> bool:
    """Keep the memory of large tensors from now on; returns whether something here can do that."""
    allocated = kernels.is_obtainable("allocator") and kernels.available("allocator") and bool(torch.ops.burnish.keep_pages())
    return allocated or _keep_heap()


def release_unused() -> None:
    """Give the heap's unused pages back: those that making a program and its first state took, as much as the state itself."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _keep_heap() -> bool:
    """Tell the C library to keep its pages; glibc alone takes it."""
    library = _glibc()
    if library is None:
        return False
    return bool(library.mallopt(M_MMAP_MAX, 0)) and bool(library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
