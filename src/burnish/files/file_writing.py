"""Write files atomically.

A file is written under another name, flushed to the disk and renamed: a reader finds the earlier file or the new one, never a
part. The writer holds a lock on it, which distinguishes a file in progress from one that a killed process left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from burnish.errors import CheckpointError, ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of Linux: paths relative to the current folder; exchange of two existing names."""
OWN_FOLDER = 0o700
"""The mode of new folders for states: only the owner may enter. Existing folders keep their mode."""


def file_path(path: str | os.PathLike[str], example: str) -> Path:
    """Return a path to write a file to or to read it from.

    Raises:
        CheckpointError: it is not a path, or is that of a folder; the message proposes ``example``.
    """
    try:
        found = Path(path)
    except TypeError:
        raise CheckpointError(f"{path!r} is not a path: give the name of a file, such as '{example}'") from None
    if "\0" in str(found):
        raise CheckpointError(f"{str(found)!r} is not a path, as it has a null character: give the name of a file")
    if os.path.isdir(found):  # no error for a name that no file can have
        raise CheckpointError(f"'{found}' is a folder: give the name of a file, such as '{found / example}'")
    return found


@contextlib.contextmanager
def replacing(path: Path, final: Callable[[], Path] | None = None) -> Iterator[Path]:
    """Yield a path to write to; the result then replaces ``path`` in one step.

    Partial files of earlier processes that were killed while writing ``path`` are removed.

    Args:
        path: the file.
        final: a function that returns the final name, if it is known only after writing.

    Raises:
        CheckpointError: writing failed, or ``path`` is a folder, device or pipe; it is unchanged.
    """
    partial = partial_path(path)
    # An administrator could replace a device by a file. These functions also accept names that no file can have.
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is {_kind(path)}: give the name of a file")
    try:
        with locked(partial):
            yield partial
            flush_to_disk(partial)
            os.replace(partial, path if final is None else final())
        flush_folder(path.parent)
        remove_left_behind(path)
    except OSError as error:
        raise CheckpointError(
            f"'{path}' could not be written: {error}. An earlier file there is untouched. "
            "Free space on the disk, or choose a folder you can write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    r"""Write a text in UTF-8 atomically. Characters of file names that UTF-8 cannot hold are escaped: ``\udcff``.

    Raises:
        CheckpointError: as for ``replacing``.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def check_output(path: Path, option: str, *, is_folder: bool = False, read: Iterable[object] = ()) -> None:
    """Raise an error, before any work is done, for a path that a result cannot be written to.

    Args:
        path: path of the result; nothing is created.
        option: the option that gives it, for the message.
        is_folder: True if the result is a folder.
        read: the model and the data that the command reads; overwriting one of these files would lose it.

    Raises:
        ConfigurationError: there is a folder in place of a file, a file in place of a folder, or a file that is read; or nothing
            can be written there.
    """
    try:
        sources = [source for source in read if isinstance(source, str | os.PathLike) and os.path.exists(source)]
        if path.is_file() and any(path.samefile(source) for source in sources):
            raise ConfigurationError(f"{option}: '{path}' is read, and would be overwritten: give the name of another file")
        if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
            wanted = "a folder" if is_folder else "a file"
            raise ConfigurationError(f"{option}: '{path}' is {_kind(path)}: give the name of {wanted}")
        place = path.absolute() if is_folder else path.absolute().parent
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise ConfigurationError(f"{option} '{path}': '{place}' is a file, and no folder: choose another place")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigurationError(f"{option} '{path}': nothing can be written to '{place}': choose a folder you can write to")
    except OSError as error:
        raise ConfigurationError(f"{option} '{path}': {error.strerror or error}: choose a folder you can write to") from error


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "a device or a pipe"


def partial_path(path: Path, ending: str = "partial") -> Path:
    """Return a new name next to ``path``, for content before or after it is in its place."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}")


@contextlib.contextmanager
def locked(partial: Path, is_folder: bool = False) -> Iterator[None]:
    """Make an empty file or folder, and hold a lock on it that ends with the process.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        if is_folder:
            partial.mkdir(parents=True)
        else:
            partial.touch()
        with contextlib.ExitStack() as holding:
            try:
                held = holding.enter_context(holding_lock(partial))
                is_there = held is None or os.path.samestat(os.fstat(held), partial.stat())
            except FileNotFoundError:  # another process removed it as a leftover before it was locked
                is_there = False
            if is_there:
                yield
                return


@contextlib.contextmanager
def holding_lock(path: Path) -> Iterator[int | None]:
    """Hold a lock on a file or folder; yield its descriptor, or None if the system has no such locks.

    Raises:
        OSError: it cannot be opened.
    """
    if fcntl is None:
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the disk has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def left_behind(path: Path) -> list[Path]:
    """Return the files and folders that killed processes left under the names of ``partial_path``."""
    named = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.(partial|earlier)")
    try:
        return [other for other in path.parent.iterdir() if named.fullmatch(other.name) and not _is_being_written(other)]
    except OSError:
        return []


def _is_being_written(path: Path) -> bool:
    if fcntl is None:
        return False  # the system does not remove open files
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_left_behind(path: Path) -> None:
    """Remove the leftovers that ``left_behind`` returns."""
    for other in left_behind(path):
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                other.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step; return False if the system or the disk cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return call is not None and call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def flush_to_disk(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Wait until a folder's list of files is on the disk, if the system offers that. Its files are in place either way."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
