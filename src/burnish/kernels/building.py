"""Find or build the libraries of kernels, one per source file.

The installation builds them if it can (``setup.py``). Others are built on first use, and cached by source, headers, compiler and
processor. Files are written atomically; damaged libraries are rebuilt, and libraries that another user could have written are not
loaded. Processes that need the same library at the same time build it once.
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
    """Return the path of the library of one source, built if necessary.

    The source may include the headers of ``compiling.header_folders``.

    Args:
        source: the C++ file.
        release: the environment of an installed library (``compiling.release_of``).
        circumstances: dependencies of a library that is built here, besides its sources, the compiler and the processor.
        preprocessing: additional flags of the compiler.
        linking: flags of the linker.

    Raises:
        RuntimeError: there is no compiler, or it rejects the file; the message starts with the reason.
        OSError: other users can write to the cache (``PermissionError``), it cannot be written, or the compiler cannot be
            started.
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
    """Return the library of a source without PyTorch, if the installation or an earlier run built it; else None.

    A damaged library in the cache is rebuilt.

    Raises:
        RuntimeError, OSError: as for ``build_library``, for a library in the cache.
    """
    library, is_whole = _find(source)
    if library is None or is_whole:
        return library
    return build_library(source) if os.path.exists(library) else None  # an unreadable cache counts as empty


def _find(source: Path, release: Sequence[str] = (), circumstances: Sequence[str] = ()) -> tuple[Path | None, bool]:
    """Return the library of a source, and True if it is complete; else its place in the cache, or None without a compiler."""
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
    """Return the library that the installation built from the current source for this processor and release, or None.

    It is trusted like the Python files next to it.
    """
    if not compiling.BUILT.is_dir():
        return None
    contents = contents or compiling.contents_of(source)
    possible = dict.fromkeys((compiling.native(), *(level for level in compiling.LEVELS if level.runs_here())))
    names = (compiling.library_name(source, instructions, *release, contents=contents) for instructions in possible)
    return next((library for name in names if (library := compiling.BUILT / name).exists()), None)


def level_of(library: Path, source: Path) -> str:
    """Return the usual name of a library's instruction set, such as ``avx512``."""
    contents = compiling.contents_of(source)
    named = {compiling.library_name(source, level, contents=contents): level.title for level in compiling.LEVELS}
    return named.get(library.name, compiling.cpu_level())


def distrust(library: Path) -> str | None:
    """Return the reason and remedy if a cached library must not be loaded; None if only this user and root could have written it.

    The file, and each folder up to the root of the cache, must belong to this user or root, and be writable only by its owner.
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
"""The remedy for a missing compiler."""
SWITCHED_OFF = "BURNISH_KERNELS=off switches them off"
"""The reason for missing kernels in ``describe``."""


def is_switched_off() -> bool:
    """True if the user disabled kernels: ``BURNISH_KERNELS=off`` in the environment.

    Raises:
        ConfigurationError: the variable is neither ``on`` nor ``off``.
    """
    return settings.is_switched_off("BURNISH_KERNELS")


def _identity(compiler: str) -> tuple[str, str]:
    """Return a compiler's path and file properties that change with its version; asking the compiler would be slow."""
    path = Path(compiler).resolve()
    found = path.stat()
    return str(path), f"{found.st_size} {found.st_mtime_ns}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Admit one process at a time. Without file locks, several may build the same library, and the last file is kept."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_root() -> Path:
    """Return the root folder of caches: ``BURNISH_CACHE``, ``XDG_CACHE_HOME`` or ``~/.cache``, else a temporary folder."""
    if named := os.environ.get("BURNISH_CACHE") or os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a user in a container without an entry in the user database
        return Path(tempfile.gettempdir(), f"burnish-{os.getuid() if hasattr(os, 'getuid') else 'cache'}")


def cache_folder() -> Path:
    """Return the folder for files that engines keep between runs: ``burnish`` in the root folder of caches."""
    return cache_root() / "burnish"


def own_cache_folder() -> Path:
    """Return the cache folder, created for this user only if it is missing.

    Raises:
        PermissionError: it belongs to another user, or other users can write to it.
    """
    folder = cache_folder()
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(folder / "any"):
        raise PermissionError(reason)
    return folder
