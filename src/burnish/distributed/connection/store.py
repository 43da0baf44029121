"""The store that workers share, short texts by name: that of ``torch.distributed``, or on one machine files in a folder."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from burnish.errors import ConfigurationError


class Store(Protocol):
    """What workers tell each other. All methods raise OSError if the store is gone."""

    def set(self, key: str, value: str) -> None:
        """Enter a value."""
        ...

    def get(self, key: str) -> str | None:
        """Return a value; None if none is entered."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before, and return it."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        """Enter a value if none is entered, or ``expected`` is."""
        ...

    def again(self) -> Store:
        """Return the same store for another thread, which does not wait for this one."""
        ...


class TorchStore:
    """A store of ``torch.distributed``, such as the one that torchrun keeps."""

    def __init__(self, store: Any):
        self._store = store

    def set(self, key: str, value: str) -> None:
        _answered(self._store.set, key, value)

    def get(self, key: str) -> str | None:
        # Its own ``get`` waits for a key that is missing.
        if not _answered(self._store.check, [key]):
            return None
        text: str = _answered(self._store.get, key).decode()
        return text

    def add(self, key: str, amount: int) -> int:
        return int(_answered(self._store.add, key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        _answered(self._store.compare_set, key, expected, desired)

    def again(self) -> TorchStore:
        try:
            return TorchStore(self._store.clone())
        except RuntimeError:  # not every kind has a second connection; one that is gone says so when it is asked
            return self


def _answered(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise OSError(str(error)) from error


class FolderStore:
    """A store of files, one for each key, in a folder that only the user can enter: no process of a run listens for others."""

    def __init__(self, folder: Path):
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        draft = self.folder / f"draft-{os.getpid()}-{threading.get_ident()}"
        draft.write_text(value)
        draft.replace(self._file(key))

    def get(self, key: str) -> str | None:
        try:
            return self._file(key).read_text()
        except FileNotFoundError:
            self.folder.stat()  # which raises if the folder itself is gone
            return None

    def add(self, key: str, amount: int) -> int:
        with self._locked():
            total = int(self.get(key) or 0) + amount
            if amount:
                self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        with self._locked():
            if self.get(key) in (None, expected):
                self.set(key, desired)

    def again(self) -> FolderStore:
        return self

    def _file(self, key: str) -> Path:
        return self.folder / f"key-{quote(key, safe='')}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder, which the system releases for a process that ends."""
        import fcntl

        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def check_folder(folder: Path) -> None:
    """See that workers can meet in a folder, and that nobody else can enter it; it is made if it is missing.

    Raises:
        ConfigurationError: it is another user's, or others may enter it, or it cannot be had.
    """
    remedy = "name a folder of your own that nobody else can enter (chmod 700), on a local disk"
    if os.name != "posix":
        raise ConfigurationError("Workers of one machine meet in a folder whose owner the system knows, which this one does not")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(f"Workers cannot meet in '{folder}' ({error.strerror}): {remedy}") from error
    if not stat.S_ISDIR(status.st_mode):
        reason = "is no folder"
    elif status.st_uid != os.geteuid():
        reason = f"belongs to another user ({status.st_uid})"
    elif status.st_mode & 0o077:
        reason = f"lets others in (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise ConfigurationError(f"Workers cannot meet in '{folder}', which {reason}: {remedy}")
