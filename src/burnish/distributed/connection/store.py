"""The locations of workers, and their shared store of short texts: in ``torch.distributed``, or files in a folder."""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from burnish.errors import ConfigurationError, EngineError
from burnish.installing import install_command

TIMEOUT_SECONDS = 60.0
FIRST_CONTACT_SECONDS = 300.0
NO_TORCH = (
    "Several workers exchange their gradients as PyTorch's tensors, and PyTorch is not installed: "
    f"{install_command('torch')}, or train with one worker, or by MPI (burnish.distributed.mpi)"
)


def check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise EngineError(NO_TORCH)


def torch_distributed() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise EngineError(NO_TORCH) from error
    if not distributed.is_available():
        raise EngineError("This PyTorch was built without torch.distributed: install another build, or train with one worker")
    return distributed


@dataclass(frozen=True)
class TorchStore:
    """A store of ``torch.distributed``, such as torchrun's. Methods raise OSError if it is gone."""

    store: Any

    def set(self, key: str, value: str) -> None:
        _answered(self.store.set, key, value)

    def get(self, key: str) -> str | None:
        # The store's own ``get`` would wait for a missing key.
        if not _answered(self.store.check, [key]):
            return None
        return str(_answered(self.store.get, key).decode())

    def add(self, key: str, amount: int) -> int:
        return int(_answered(self.store.add, key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        _answered(self.store.compare_set, key, expected, desired)

    def again(self) -> TorchStore:
        """Return the same store for another thread, with a separate connection."""
        try:
            return TorchStore(self.store.clone())
        except RuntimeError:  # some kinds have no second connection; a lost store raises on the next request
            return self


def _answered(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise OSError(str(error)) from error


@dataclass(frozen=True)
class FolderStore:
    """A store of one file per key, in a folder that only the user can enter; no network is involved."""

    folder: Path

    def set(self, key: str, value: str) -> None:
        draft = self.folder / f"draft-{os.getpid()}-{threading.get_ident()}"
        draft.write_text(value)
        draft.replace(self._file(key))

    def get(self, key: str) -> str | None:
        try:
            return self._file(key).read_text()
        except FileNotFoundError:
            self.folder.stat()  # raises if the folder itself is gone
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
        import fcntl  # the system releases its locks when a process ends

        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


Store = TorchStore | FolderStore


def check_folder(folder: Path) -> None:
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


@dataclass(frozen=True)
class Location:
    """The location of a worker: host, process, and a text that identifies the running system and its namespaces."""

    host: str
    process: int
    system: str

    @classmethod
    def own(cls) -> Location:
        host = socket.gethostname()
        try:
            # Containers and network or process namespaces on one machine count as separate machines.
            spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
            system = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {spaces}"
        except OSError:
            system = host
        return cls(host, os.getpid(), system)

    @property
    def has_ended(self) -> bool:
        if self.system != Location.own().system or os.name != "posix":
            return False
        try:
            os.kill(self.process, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


@dataclass(frozen=True)
class Meeting:
    """Workers that have found each other. ``torch_store`` is ``store`` in the form for ``torch.distributed``."""

    store: Store
    torch_store: Any
    locations: Sequence[Location]
    address: str
    keeper: str
    group: Any = None


def ranks(numbers: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2 and 5``; if there are more than six, only the first ones."""
    names = [str(number) for number in sorted(numbers)]
    if len(names) > 6:
        names[6:] = [f"{len(names) - 6} more"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")
