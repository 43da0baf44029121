"""Finding of the kernels' libraries, or building of them: one compiler process and one library per source file.

The installation has built them where it could (``setup.py``). What it has not, or what was changed since, is built when it is
first wanted, and kept in the cache for the same source and headers, compiler and such a processor. Files come there whole or not
at all, and processes that want the same library at once build it once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.engines.kernels import compiling
from burnish.engines.kernels.compiling import find_compiler


def build_library(
    source: Path,
    release: Sequence[str] = (),
    circumstances: Sequence[str] = (),
    preprocessing: Sequence[str] = (),
    linking: Sequence[str] = (),
) -> Path:
    """Find the library of one source, or build it; returns the library's path.

    The source may include the headers of ``compiling.header_folders``.

    Args:
        source: the file in C++.
        release: what a library is for that the installation has built (``compiling.release_of``).
        circumstances: what one that is built here depends on beside its sources, the compiler and the processor.
        preprocessing: further flags of the compiler.
        linking: those of the linker.

    Raises:
        RuntimeError: there is no compiler, or it refuses the file; the message begins with why.
        OSError: the cache cannot be written, or the compiler not started.
    """
    if built := find_built(source, release, circumstances):
        return built
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
    library = _in_cache(source, release, circumstances, compiler)
    library.parent.mkdir(parents=True, exist_ok=True)
    with locked(library.parent / f"{source.stem}.lock"):
        if not library.exists():
            compiling.compile_library(source, library, compiler, compiling.native(), preprocessing, linking)
    return library


def find_built(source: Path, release: Sequence[str] = (), circumstances: Sequence[str] = ()) -> Path | None:
    """The library of a source, where the installation has built it or an earlier run; None where none has. Arguments as
    ``build_library`` takes them."""
    if installed := find_installed(source, release):
        return installed
    compiler = find_compiler()
    library = None if compiler is None else _in_cache(source, release, circumstances, compiler)
    return library if library is not None and library.exists() else None


def _in_cache(source: Path, release: Sequence[str], circumstances: Sequence[str], compiler: str) -> Path:
    depends_on = "\n".join((*circumstances, compiler, _version(compiler)))
    return cache_folder() / compiling.library_name(source, compiling.native(), depends_on, *release)


def find_installed(source: Path, release: Sequence[str] = ()) -> Path | None:
    """The library that the installation has built of a source as it is now, for such a processor and this release; None where it
    has not."""
    if not compiling.BUILT.is_dir():
        return None
    possible = (compiling.native(), *(level for level in compiling.LEVELS if level.runs_here()))
    libraries = (compiling.BUILT / compiling.library_name(source, instructions, *release) for instructions in possible)
    return next((library for library in libraries if library.exists()), None)


def is_switched_off() -> bool:
    """Whether the user wants no kernels: ``BURNISH_KERNELS=off`` in the environment."""
    return os.environ.get("BURNISH_KERNELS") == "off"


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


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
