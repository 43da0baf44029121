"""Pages that are kept: tensors of a step get the memory of the step before, instead of fresh pages from the operating system.

glibc gives every large block back as soon as it is free, and a fresh page costs as much as filling it: a quarter to a half of a
step. Where the engine's own kernels are there, the large CPU tensors of burnish's graphs come from an allocator of theirs
(``allocator.cpp``), and all others from where they came before. It also refuses what the machine, or a limit of the
process's control groups, has no memory for: the system would end the process. Elsewhere glibc is told to keep its heap, which
holds for the whole process, and nothing is refused.
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

# From malloc.h. No block is mapped on its own, and what is free at the top of the heap is not given back.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEPT_BYTES = 2**31 - 1
LONGEST_NAME = 1024

_AS_IT_IS = nullcontext()

declare_kernel("allocator", "keep_pages() -> bool", use=Use.ALL)


class KeptPages:
    """A context in which this thread's large CPU tensors come from the pages that are kept.

    Attributes:
        address: of the C function that enters it, given 1, and leaves it, given 0.
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
    """How much more memory a process may use.

    Attributes:
        size: in bytes, before what is kept in reserve.
        of: the limit that says so.
    """

    size: int
    of: str


def keep_pages(owner: object | None = None) -> AbstractContextManager[None]:
    """Keep the memory of large tensors as long as ``owner`` lives, None for good.

    Returns:
        The context in which such tensors come from it; one that does nothing where the C library keeps its own, or nothing does.
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
    """The functions of the allocator, which stands in PyTorch's place from now on; None where it cannot."""
    if not (kernels.is_obtainable("allocator") and kernels.available("allocator") and torch.ops.burnish.keep_pages()):
        return None
    library = ctypes.PyDLL(str(kernels.library("allocator")))  # which keeps the interpreter's lock: they return at once
    library.burnish_serve.argtypes, library.burnish_serve.restype = [ctypes.c_int], None
    library.burnish_keep_for.argtypes, library.burnish_keep_for.restype = [ctypes.c_int], None
    library.burnish_in_use.argtypes, library.burnish_in_use.restype = [], ctypes.c_size_t
    library.burnish_memory_left.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    library.burnish_memory_left.restype = ctypes.c_size_t
    library.burnish_serve(0)  # only where a graph runs
    return library


def memory_left(root: str = "") -> Room | None:
    """Return what the allocator finds to be left, with ``root`` in front of the system's paths; None where it is not there."""
    library = allocator()
    if library is None:
        return None
    of = ctypes.create_string_buffer(LONGEST_NAME)
    size = library.burnish_memory_left(root.encode(), of, LONGEST_NAME - 1)
    return Room(size, of.value.decode())


def release_unused() -> None:
    """Give the heap's unused pages back: those that making a program and its first state took, as much as the state itself."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
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
