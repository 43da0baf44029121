"""Finding of the kernels' libraries, or building of them: one compiler process and one library per source file.

The installation has built them where it could (``setup.py``). What it has not, or what was changed since, is built when it is
first wanted, and kept in the cache for the same source and headers, compiler, PyTorch and such a processor. Files come there
whole or not at all, and processes that want the same library at once build it once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from burnish.engines.torch.native import compiling
from burnish.engines.torch.native.compiling import find_compiler

OLDEST_TORCH = (2, 10)
"""The first PyTorch whose stable interface has lists of tensors and parallel loops."""


def build_library(source: Path) -> Path:
    """Find the library of one source, or build it; returns the library's path.

    The source may include the headers beside it, and those that all kernels share.

    Raises:
        RuntimeError: PyTorch is too old, there is no compiler, or it refuses the file; the message begins with why.
        OSError: the cache cannot be written, or the compiler not started.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise RuntimeError(f"they need PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later, and this is {torch.__version__}")
    if installed := find_installed(source):
        return installed
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    cache = cache_folder()
    instructions = compiling.native()
    library = cache / compiling.library_name(
        source, instructions, _circumstances(compiler), *compiling.release_of(source, torch.__version__)
    )
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    headers = compiling.Headers(torch.__version__, _torch_folder() / "include")
    with locked(cache / f"{source.stem}.lock"):
        if not library.exists():
            compiling.compile_library(source, library, compiler, instructions, headers.flags, _link_flags(source))
    return library


def find_installed(source: Path) -> Path | None:
    """The library that the installation has built of a source as it is now, for such a processor, and where it includes PyTorch's
    headers, for this PyTorch; None where it has not."""
    if not compiling.BUILT.is_dir():
        return None
    release = compiling.release_of(source, torch.__version__)
    possible = (compiling.native(), *(level for level in compiling.LEVELS if level.runs_here()))
    libraries = (compiling.BUILT / compiling.library_name(source, instructions, *release) for instructions in possible)
    return next((library for library in libraries if library.exists()), None)


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _link_flags(source: Path) -> list[str]:
    folder = _torch_folder() / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{folder}", *(f"-l{name}" for name in compiling.linked_libraries(source)), *undefined]


@functools.cache
def _circumstances(compiler: str) -> str:
    """What a library that is built here depends on beside its sources and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return "\n".join((torch.__version__, str(_torch_folder()), compiler, version))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in. Where there are no locks of files, several build the same, and the last one's file stays."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> Path:
    """Where the engine keeps files between runs: ``burnish`` in ``BURNISH_CACHE``, ``XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("BURNISH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "burnish"
