"""One run at a time goes on in a folder: a lock says so, which the system takes away however its process ends."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from burnish.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
REMEDY = "wait until it has ended, or stop it; or choose another folder (run_directory, --output)"


@dataclass
class _Held:
    """The lock of a folder, in the process that has it: a file that is open, and those that share it.

    Attributes:
        file: its descriptor.
        sharers: numbers of ``RunLock`` objects, in the order in which they came.
        running: the one whose run goes on.
    """

    file: int
    made_folder: bool
    sharers: list[int] = field(default_factory=list)
    running: int | None = None


_held: dict[Path, _Held] = {}
_changes = threading.RLock()


class RunLock:
    """The lock of a run's folder. In one process several may have it, of whose runs one at a time goes on (``begin``).

    Args:
        folder: of the run; made if there is none. If it cannot be written to, or the disk has no locks, nothing is locked.

    Raises:
        ConfigurationError: a run goes on in the folder, in another process or in this one.
    """

    def __init__(self, folder: Path):
        self._folder, self._path, self._number = folder, folder.resolve() / LOCK, id(self)
        self._release: weakref.finalize | None = None
        if fcntl is None:
            return
        with _changes:
            held = _held.get(self._path)
            if held is None:
                try:
                    is_new = not folder.exists()
                    folder.mkdir(parents=True, exist_ok=True)
                    held = _Held(_locked(self._path, folder), is_new)
                except OSError:
                    return
                _held[self._path] = held
            elif held.running is not None:
                raise ConfigurationError(f"A run is going on in '{folder}', in this process: {REMEDY}")
            held.sharers.append(self._number)
        self._release = weakref.finalize(self, _leave, self._path, self._number)

    def begin(self) -> None:
        """Let the run of this lock go on, and no other.

        Raises:
            ConfigurationError: another one in this process was prepared since in the same folder, or goes on.
        """
        with _changes:
            held = _held.get(self._path)
            if held is None or self._number not in held.sharers:  # nothing is locked
                return
            if held.running not in (None, self._number):
                raise ConfigurationError(f"A run is going on in '{self._folder}', in this process: {REMEDY}")
            if held.sharers[-1] != self._number:
                raise ConfigurationError(
                    f"Another run was prepared in '{self._folder}' after this one, by this process, and the folder is its own "
                    "now: run that one, or choose another folder (run_directory)"
                )
            held.running = self._number

    def release(self) -> None:
        """Let others run in the folder."""
        if self._release is not None:
            self._release()


def _locked(path: Path, folder: Path) -> int:
    """Return the descriptor of a lock's file, which this process has locked now."""
    while True:
        try:
            # Nobody else may open it: whoever can may also lock it. A link would lead to another file, which is written to.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
        except PermissionError as error:
            if os.path.lexists(path):
                raise ConfigurationError(
                    f"A run of another user goes on in '{folder}', or was killed there: choose another folder (run_directory, "
                    f"--output), or let that user remove '{path}'"
                ) from error
            raise
        except OSError as error:
            if path.is_symlink():
                raise ConfigurationError(f"'{path}' is a link, and no lock of a run: remove it") from error
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            process, _, host = os.read(file, 200).decode("ascii", "replace").strip().partition(" ")
            os.close(file)
            owner = "in this process" if (process, host) == (str(os.getpid()), _host()) else f"in process {process} on '{host}'"
            raise ConfigurationError(f"A run is going on in '{folder}'{f', {owner}' if process else ''}: {REMEDY}") from error
        except OSError:
            os.close(file)
            raise
        if _is_in_place(file, path):
            break
        os.close(file)  # its owner has just removed it
    os.truncate(file, 0)
    os.write(file, f"{os.getpid()} {_host()}\n".encode("ascii", "replace"))
    return file


def _host() -> str:
    return socket.gethostname()


def _is_in_place(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _leave(path: Path, number: int) -> None:
    with _changes:
        held = _held.get(path)
        if held is None or number not in held.sharers:  # of the process that this one was forked from
            return
        held.sharers.remove(number)
        if held.running == number:
            held.running = None
        if not held.sharers:
            del _held[path]
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                if held.made_folder:
                    path.parent.rmdir()  # where nothing else came into it
            os.close(held.file)


def _forget_in_child() -> None:
    """The locks are the parent's: a forked process must not keep them when that has ended."""
    global _changes
    _changes = threading.RLock()
    for held in _held.values():
        os.close(held.file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
