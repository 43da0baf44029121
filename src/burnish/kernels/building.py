"""Finds the libraries of kernels, or builds them: one library for each source file.

The installation builds them if it can (``setup.py``). A library that it did not build, or that changed since, is built when it is
first wanted, and kept in the cache for the same source, headers, compiler and processor. A file comes there whole or not at all;
a damaged one is built again, and one that another user could have written is not loaded. Processes that want the same library at
the same time build it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish import settings
from burnish.kernels import compiling
from burnish.kernels.compiling import find_compiler


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
        release: what an installed library is for (``compiling.release_of``).
        circumstances: what a library that is built here depends on, besides its sources, the compiler and the processor.
        preprocessing: further flags of the compiler.
        linking: flags of the linker.

    Raises:
        RuntimeError: there is no compiler, or it refuses the file; the message begins with why.
        OSError: other users can write to the cache (``PermissionError``), it cannot be written, or the compiler not started.
    """
    library, is_whole = _find(source, release, circumstances)
    if library is not None and is_whole:
        return library
    compiler = find_compiler()
    if library is None or compiler is None:
        raise RuntimeError(f"there is no C++ compiler: {NEEDS_COMPILER}")
    own_cache_folder()
    with locked(library.parent / f"{source.stem}.lock"):
        if not _is_whole(library):
            compiling.compile_library(source, library, compiler, compiling.native(), preprocessing, linking)
            _note_digest(library)
    return library


def find_built(source: Path) -> Path | None:
    """The library of a source that includes nothing of PyTorch's, if the installation built it, or an earlier run; else None.

    A damaged library in the cache is built again.

    Raises:
        RuntimeError, OSError: as ``build_library`` does, of a library that is in the cache.
    """
    library, is_whole = _find(source)
    if library is None or is_whole:
        return library
    return build_library(source) if os.path.exists(library) else None  # a cache that cannot be read is none


def _find(source: Path, release: Sequence[str] = (), circumstances: Sequence[str] = ()) -> tuple[Path | None, bool]:
    """The library of a source, and whether it is there and complete; else its place in the cache, or None without a compiler."""
    contents = compiling.contents_of(source)
    installed = find_installed(source, release, contents)
    compiler = find_compiler()
    cached = None if compiler is None else _in_cache(source, release, circumstances, compiler, contents)
    if installed is not None or cached is None:
        return installed, installed is not None
    if os.path.lexists(cached) and (reason := distrust(cached)):
        raise PermissionError(reason)
    return cached, _is_whole(cached)


def _in_cache(source: Path, release: Sequence[str], circumstances: Sequence[str], compiler: str, contents: bytes) -> Path:
    depends_on = "\n".join((*circumstances, *_identity(compiler)))
    return cache_folder() / compiling.library_name(source, compiling.native(), depends_on, *release, contents=contents)


def find_installed(source: Path, release: Sequence[str] = (), contents: bytes | None = None) -> Path | None:
    """The library that the installation built of a source as it is now, for this processor and this release; None if it did not.

    It is trusted as the files of Python next to it are.
    """
    if not compiling.BUILT.is_dir():
        return None
    contents = contents or compiling.contents_of(source)
    possible = dict.fromkeys((compiling.native(), *(level for level in compiling.LEVELS if level.runs_here())))
    names = (compiling.library_name(source, instructions, *release, contents=contents) for instructions in possible)
    return next((library for name in names if (library := compiling.BUILT / name).exists()), None)


def level_of(library: Path, source: Path) -> str:
    """What people call the instructions that a library was compiled for, such as ``avx512``."""
    contents = compiling.contents_of(source)
    named = {compiling.library_name(source, level, contents=contents): level.title for level in compiling.LEVELS}
    return named.get(library.name, compiling.cpu_level())


def distrust(library: Path) -> str | None:
    """Why a library in the cache must not be loaded, with a remedy; None if nobody but this user and root could have written it.

    The file, and each folder up to the root of the cache, must belong to one of them, and nobody else may write to it.
    """
    if not hasattr(os, "geteuid"):  # Windows: the cache is in the user's own profile
        return None
    root = cache_root().resolve()
    for place in (root, root / library.parent.name, root / library.parent.name / library.name):
        try:
            found = place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"'{place}' in the cache of kernels cannot be read ({error.strerror}): name a folder in BURNISH_CACHE"
        if stat.S_ISLNK(found.st_mode):
            problem, remedy = "is a symbolic link", f"remove it (rm '{place}')"
        elif found.st_uid not in (0, os.geteuid()):
            problem, remedy = "belongs to another user", "name a folder of your own in BURNISH_CACHE"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem, remedy = "can be written by other users", f"empty it, and take that right away (chmod go-w '{place}')"
        else:
            continue
        return f"'{place}' in the cache of kernels {problem}, so nothing is loaded from there: {remedy}"
    return None


def _is_whole(library: Path) -> bool:
    """Whether a library in the cache is there, and holds the bytes that were written."""
    try:
        return _digest_file(library).read_text(encoding="ascii") == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _note_digest(library: Path) -> None:
    noted = _digest_file(library)
    partial = noted.with_suffix(".partial")
    partial.write_text(hashlib.sha256(library.read_bytes()).hexdigest(), encoding="ascii")
    compiling.replace_durably(partial, noted)


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


NEEDS_COMPILER = "install g++ or clang++, or name one in CXX"
"""What to do without a compiler."""
SWITCHED_OFF = "BURNISH_KERNELS=off switches them off"
"""Why there are no kernels, as ``describe`` says it."""


def is_switched_off() -> bool:
    """True if the user wants no kernels: ``BURNISH_KERNELS=off`` in the environment.

    Raises:
        ConfigurationError: the variable says something else than ``on`` or ``off``.
    """
    return settings.is_switched_off("BURNISH_KERNELS")


def _identity(compiler: str) -> tuple[str, str]:
    """A compiler's path and what changes with its version; to start it and ask would take longer than all else here."""
    path = Path(compiler).resolve()
    found = path.stat()
    return str(path), f"{found.st_size} {found.st_mtime_ns}"


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


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of one that says nothing, its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_root() -> Path:
    """The folder of caches: ``BURNISH_CACHE``, ``XDG_CACHE_HOME`` or ``~/.cache``; for a user without a home, a temporary one."""
    if named := os.environ.get("BURNISH_CACHE") or os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user that no list of users names
        return Path(tempfile.gettempdir(), f"burnish-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")


def cache_folder() -> Path:
    """Where engines keep files between runs: ``burnish`` in the folder of caches."""
    return cache_root() / "burnish"


def own_cache_folder() -> Path:
    """The cache folder, made for this user alone if it is missing.

    Raises:
        PermissionError: it belongs to another user, or other users can write to it.
    """
    folder = cache_folder()
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(folder / "any"):
        raise PermissionError(reason)
    return folder
