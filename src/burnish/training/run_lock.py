"""One process at a time runs in a folder: a lock says so, which the system takes away however the process ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from burnish.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


@dataclass
class _Held:
    """A lock of this process: it is lost as soon as one of several files that it had open is closed, so there is one."""

    file: BinaryIO
    process: int
    made_folder: bool
    runs: int = 1


_held: dict[Path, _Held] = {}


class RunLock:
    """The lock of a run's folder. In one process several runs may have it, as they follow each other.

    Args:
        folder: of the run; made where there is none. Where it cannot be written to, or the disk has no locks, nothing is locked.

    Raises:
        ConfigurationError: another process runs in the folder.
    """

    def __init__(self, folder: Path):
        self._release: weakref.finalize | None = None
        if fcntl is None:
            return
        path = folder.absolute() / LOCK
        held = _held.get(path)
        if held is not None and held.process == os.getpid():
            held.runs += 1
        else:
            try:
                is_new = not folder.exists()
                folder.mkdir(parents=True, exist_ok=True)
                _held[path] = _Held(_locked(path, folder), os.getpid(), is_new)
            except OSError:
                return
        self._release = weakref.finalize(self, _leave, path)

    def release(self) -> None:
        """Let other processes run in the folder."""
        if self._release is not None:
            self._release()


def _locked(path: Path, folder: Path) -> BinaryIO:
    """The file of a lock, which this process has now."""
    while True:
        file = open(path, "a+b")  # noqa: SIM115  # open as long as the run goes on
        try:
            # Of the process: one that it starts to read data must not hold it when this one has ended.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            owner = file.read(20).decode("ascii", "replace")
            file.close()
            raise ConfigurationError(
                f"A run is going on in '{folder}'{f', in process {owner}' if owner else ''}: wait until it has ended, or stop "
                "it; or choose another folder (run_directory, --output)"
            ) from error
        if _is_in_place(file, path):
            break
        file.close()  # its owner has just removed it
    file.truncate(0)
    file.write(str(os.getpid()).encode())
    file.flush()
    return file


def _is_in_place(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _leave(path: Path) -> None:
    held = _held.get(path)
    if held is None or held.process != os.getpid():  # of the process that this one was forked from
        return
    held.runs -= 1
    if not held.runs:
        del _held[path]
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if held.made_folder:
                path.parent.rmdir()  # where nothing else came into it
        held.file.close()
