"""Kept pages: tensors of a step reuse the memory of the previous step, instead of new pages from the operating system.

glibc returns every large block when it is freed, and a new page costs as much as filling it: a quarter to a half of a step. With
the engine's own kernels, large CPU tensors of burnish's graphs use its allocator (``allocator.cpp``), which also refuses
allocations beyond the memory of the machine or a control group, where the system would kill the process. Without the kernels,
glibc keeps its heap, for the whole process, and nothing is refused.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.native import Use, declare_kernel

# From malloc.h: map no block separately, and do not return free memory at the top of the heap.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 2**31 - 1
LONGEST_NAME = 1024

_AS_IT_IS = nullcontext()

declare_kernel("allocator", "keep_pages() -> bool", use=Use.ALL)


class KeptPages:
    """A context in which this thread's large CPU tensors come from kept pages.

    Attributes:
        address: address of the C function that enters it, given 1, and leaves it, given 0.
    """

    __slots__ = ("_serve", "address")

    def __init__(self, serve: Callable[[int], None]):
        self._serve = serve
        self.address: int = ctypes.cast(serve, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self._serve(1)

    def __exit__(self, *raised: object) -> None:
        self._serve(0)


class Room(NamedTuple):
    """The memory that a process may still use.

    Attributes:
        size: bytes, including the reserve.
        of: name of the limit.
    """

    size: int
    of: str


def keep_pages(owner: object | None = None) -> AbstractContextManager[None]:
    """Keep the memory of large tensors while ``owner`` lives; permanently for None.

    Returns:
        The context in which such tensors use it; an empty context if the C library or nothing keeps memory.
    """
    library = allocator()
    if library is None:
        _keep_heap()
        return _AS_IT_IS
    library.burnish_keep_for(1)
    if owner is not None:
        weakref.finalize(owner, library.burnish_keep_for, -1).atexit = False
    return KeptPages(library.burnish_serve)


@functools.cache
def allocator() -> ctypes.PyDLL | None:
    """Return the functions of the allocator after it has replaced PyTorch's; None if that is impossible."""
    if not (kernels.is_obtainable("allocator") and kernels.available("allocator") and torch.ops.burnish.keep_pages()):
        return None
    library = ctypes.PyDLL(str(kernels.library("allocator")))  # holds the interpreter's lock: these functions return at once
    library.burnish_serve.argtypes, library.burnish_serve.restype = [ctypes.c_int], None
    library.burnish_keep_for.argtypes, library.burnish_keep_for.restype = [ctypes.c_int], None
    library.burnish_in_use.argtypes, library.burnish_in_use.restype = [], ctypes.c_size_t
    library.burnish_memory_left.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    library.burnish_memory_left.restype = ctypes.c_size_t
    library.burnish_serve(0)  # only while a graph runs
    return library


def memory_left(root: str = "") -> Room | None:
    """Return the remaining memory, with ``root`` before the system's paths; None without the allocator."""
    library = allocator()
    if library is None:
        return None
    of = ctypes.create_string_buffer(LONGEST_NAME)
    size = library.burnish_memory_left(root.encode(), of, LONGEST_NAME - 1)
    return Room(size, of.value.decode())


def release_unused() -> None:
    """Return unused heap pages to the system: making a program and its initial state took as many as the state itself."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _keep_heap() -> bool:
    """Tell the C library to keep its pages; only glibc supports it."""
    library = _glibc()
    if library is None:
        return False
    return bool(library.mallopt(M_MMAP_MAX, 0)) and bool(library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
