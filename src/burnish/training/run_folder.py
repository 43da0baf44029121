"""The folder of a run: the table of its figures, their curves, and checkpoints with the position of the run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data import Dataset
from burnish.data.splitting import SPLIT, Split
from burnish.errors import CheckpointError, ConfigurationError, DataError
from burnish.training.callbacks.base import Callbacks
from burnish.training.feature_dataset import FeatureDataset
from burnish.training.metric_totals import Means
from burnish.training.run_files import CheckpointFolder
from burnish.training.run_position import Position
from burnish.training.run_results import EVALUATION_PREFIX, MetricsTable, Row, draw_curves
from burnish.training.session import Session
from burnish.untrusted_files import UNREADABLE

CURVES = "curves.png"
DRAW_EVERY_SECONDS = 60.0
NO_CALLBACKS = Callbacks(())


class RunFolder:
    """``metrics.csv``, ``curves.png`` and ``checkpoints/`` of a run.

    Args:
        path: the folder.
        course: settings that determine the run besides the program; a resumed run must match them.
        keep, journal: as in ``CheckpointFolder``.
        callbacks: callbacks with states to store in checkpoints.
        data: training data, which must be unchanged in a resumed run; None to skip the check.
        split: held-out part of the data, stored in the folder of a new run, or None.

    Attributes:
        is_kept: False if the folder is removed when the run ends, so that no message points to it.
    """

    def __init__(
        self,
        path: Path,
        course: Mapping[str, Any],
        keep: int = 1,
        journal: bool = False,
        callbacks: Callbacks = NO_CALLBACKS,
        data: Dataset | None = None,
        split: Split | None = None,
    ):
        self.path = path
        self.is_kept = True
        self.checkpoints = CheckpointFolder(path / "checkpoints", keep, journal)
        self._course = dict(course)
        self._names: Sequence[str] = ()
        self._table: MetricsTable | None = None
        self._drawn = time.monotonic()
        self._callbacks = callbacks
        self._data = data
        self._split = split
        self._lock: RunLock | None = None

    @property
    def rows(self) -> list[Row]:
        return [] if self._table is None else self._table.rows

    def take(self) -> None:
        """Lock the folder against other runs, until ``leave`` or the end of this process.

        Raises:
            ConfigurationError: another run is active in it.
        """
        if self._lock is None:
            self._lock = RunLock(self.path)

    def enter(self) -> None:
        """Begin to run in the folder, as ``take``."""
        self.take()
        if self._lock is not None:
            self._lock.begin()

    def leave(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def check_unused(self) -> None:
        """Check that there is no run in the folder.

        Raises:
            ConfigurationError: there is one.
        """
        if self.checkpoints.exists:
            raise ConfigurationError(
                f"'{self.path}' holds a run already: go on with it (resume=True), choose another run_directory, "
                "or drop it (overwrite=True)"
            )

    def restored(self, session: Session) -> tuple[Position, list[str]]:
        """Restore the newest complete checkpoint.

        Returns:
            The position of the run, and sentences on skipped or dropped files.

        Raises:
            CheckpointError: there is no complete one, it is not a trainer's, or the run was started with other options.
            DataError: the run was started with other data.
        """
        if not self.checkpoints.exists:
            raise CheckpointError(f"There is nothing to resume in '{self.path}': start the run without resume")
        extra, path, passed_over = self.checkpoints.restore(session)
        try:
            course, position = dict(extra["course"]), Position.from_dict(extra["position"])
        except UNREADABLE as error:
            raise CheckpointError(
                f"'{path}' was not written by a Trainer and does not say where in the data it was: "
                "load it with Session.restore, or start a new run from its state"
            ) from error
        for name, value in self._course.items():
            if course.get(name) != value:
                raise CheckpointError(
                    f"The run in '{self.path}' was started with {name}={course.get(name)}, and is now to go on with "
                    f"{name}={value}: give it what it was started with, or start a new run"
                )
        if self._data is not None:
            check_fingerprint(extra.get("data"), self._fingerprint, str(self.path), str(path))
        self._callbacks.load_states(extra.get("callbacks"))
        return position, passed_over

    def begin(
        self, names: Sequence[str], training_only: Collection[str], last_step: int | None, evaluation_only: Sequence[str] = ()
    ) -> None:
        """Create the folder and its table; a new run drops the checkpoints of an earlier one.

        Args:
            names: figures that a step reports.
            training_only: those of them without an evaluation figure.
            last_step: step from which a resumed run continues; None for a new run.
            evaluation_only: figures that only evaluation reports.

        Raises:
            CheckpointError: the folder or the table cannot be written, or the table belongs to another run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The folder '{self.path}' cannot be made: {error}. Choose a folder you can write to"
            ) from error
        if self._data is not None:
            _ = self._fingerprint  # of the data before the first step
        self._names = [*names, *evaluation_only]
        self._table = MetricsTable(self.path / "metrics.csv", names, last_step, training_only, evaluation_only)
        if last_step is None:
            if self._split is None:
                (self.path / SPLIT).unlink(missing_ok=True)
            else:
                self._split.write(self.path)
            self.checkpoints.clear()
            with contextlib.suppress(OSError):  # a failing picture must not stop a run
                (self.path / CURVES).unlink(missing_ok=True)

    def add_row(self, position: Position, averages: Mapping[str, float], evaluation: Mapping[str, float]) -> None:
        """Append a row to the table: the averages since the last row, which are reset, and evaluation figures."""
        assert self._table is not None
        self._table.append(
            {
                "step": position.step,
                "epoch": position.epoch + 1,
                "samples": position.samples,
                "seconds": round(position.seconds, 3),
                "lr": position.rate,
                **averages,
                **{EVALUATION_PREFIX + name: value for name, value in evaluation.items()},
            }
        )
        position.since_row = Means()

    def save(self, session: Session, position: Position, is_best: bool = False) -> None:
        """Write the latest checkpoint; with ``is_best``, as a link to the one that ``save_best`` has just written.

        Raises:
            CheckpointError: as ``CheckpointFolder.save``.
        """
        self.checkpoints.save(session, self._extra(position), is_best)

    def save_best(self, session: Session, position: Position) -> None:
        self.checkpoints.save_best(session, self._extra(position))

    def draw(self, at_once: bool = False) -> str | None:
        """Draw the curves, at most once a minute unless ``at_once``.

        Returns:
            None, or with ``at_once`` the reason why they were not drawn.
        """
        if not self.rows or (not at_once and time.monotonic() - self._drawn < DRAW_EVERY_SECONDS):
            return None
        self._drawn = time.monotonic()
        try:
            reason = draw_curves(self.rows, self.path / CURVES, self._names)
        except CheckpointError as error:
            # A failing picture must not hide why a run stopped, nor stop one.
            reason = str(error)
        return reason if at_once else None

    def _extra(self, position: Position) -> dict[str, Any]:
        extra = {"course": self._course, "position": asdict(position)}
        if self._data is not None:
            extra["data"] = self._fingerprint
        states = self._callbacks.states()
        return {**extra, "callbacks": states} if states else extra

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        assert self._data is not None
        return fingerprint(self._data)


class FollowedFolder(RunFolder):
    """The folder of a run for all workers but the first, which writes it; the others give it their part of the state."""

    def begin(
        self, names: Sequence[str], training_only: Collection[str], last_step: int | None, evaluation_only: Sequence[str] = ()
    ) -> None:
        pass

    def add_row(self, position: Position, averages: Mapping[str, float], evaluation: Mapping[str, float]) -> None:
        position.since_row = Means()

    def save(self, session: Session, position: Position, is_best: bool = False) -> None:
        session.take_part()

    def save_best(self, session: Session, position: Position) -> None:
        session.take_part()

    def draw(self, at_once: bool = False) -> str | None:
        return None


ROWS_COMPARED = 8


def fingerprint(dataset: Dataset) -> dict[str, str]:
    """Return hashes of a few spread samples, by index: of names, dtypes, shapes and values of their arrays.

    A sample that cannot be read, or has a NaN or infinite value, is left out: it may be repaired before the run is resumed. A
    data set that is not deterministic has no hashes.
    """
    source = dataset.source if isinstance(dataset, FeatureDataset) else dataset
    places = np.unique(np.linspace(0, len(source) - 1, ROWS_COMPARED).astype(np.int64)).tolist()
    hashes = {str(place): _hash(source, place) for place in places}
    if hashes["0"] != _hash(source, 0):
        return {}
    return {place: found for place, found in hashes.items() if found is not None}


def check_fingerprint(found: object, now: Mapping[str, str], run: str, checkpoint: str) -> None:
    """Check that a run is resumed with the same data.

    Args:
        found: ``fingerprint`` of the original data; None if it was not stored.
        now: ``fingerprint`` of the present data, with as many samples.
        run, checkpoint: names of the run and its checkpoint in an error.

    Raises:
        DataError: a sample differs.
    """
    if not isinstance(found, Mapping):
        return
    for place, value in now.items():
        if found.get(place, value) != value:
            raise DataError(
                f"The run in '{run}' was started with other data: sample {place} has changed since. Give it the data that it was "
                f"started with; or start a new run in its state with these (start_from, --start-from '{checkpoint}')"
            )


def _hash(dataset: Dataset, place: int) -> str | None:
    try:
        sample: dict[str, Any] = dataset.batch(np.array([place], np.int64))
        arrays = {name: np.asarray(array) for name, array in sorted(sample.items())}
    except Exception:  # any error of a data set shows again when the sample is trained on
        return None
    digest = hashlib.sha256()
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return None
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        digest.update(repr((name, str(array.dtype), array.shape, len(content))).encode() + content)
    return digest.hexdigest()[:16]


def fresh_folder(folder: Path) -> Path:
    """Return the folder for a new run: this one, or with the first free suffix from ``-2`` on."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([folder], others) if not CheckpointFolder(each / "checkpoints").exists)


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
REMEDY = "wait until it has ended, or stop it; or choose another folder (run_directory, --output)"


@dataclass
class _Held:
    """The lock of a folder in the process that holds it: an open file, shared by several runs.

    Attributes:
        file: file descriptor.
        sharers: ids of ``RunLock`` objects, in order of arrival.
        running: id of the active one.
    """

    file: int
    made_folder: bool
    sharers: list[int] = field(default_factory=list)
    running: int | None = None


_held: dict[Path, _Held] = {}
_changes = threading.RLock()


class RunLock:
    """The lock of a run's folder. Several runs in one process may share it, but only one is active (``begin``).

    Args:
        folder: folder of the run, created if missing. If it cannot be written to, or the disk has no locks, nothing is locked.

    Raises:
        ConfigurationError: a run is active in the folder, in another process or in this one.
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
        """Make the run of this lock the active one.

        Raises:
            ConfigurationError: another run of this process was prepared later in the same folder, or is active.
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
        if self._release is not None:
            self._release()


def _locked(path: Path, folder: Path) -> int:
    while True:
        try:
            # Only the owner may open it: whoever can open it can lock it. A link would redirect the write to another file.
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
        if held is None or number not in held.sharers:  # inherited from the parent process
            return
        held.sharers.remove(number)
        if held.running == number:
            held.running = None
        if not held.sharers:
            del _held[path]
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                if held.made_folder:
                    path.parent.rmdir()  # if the folder is empty
            os.close(held.file)


def _forget_in_child() -> None:
    """Release the parent's locks: a forked process must not keep them after its parent ends."""
    global _changes
    _changes = threading.RLock()
    for held in _held.values():
        os.close(held.file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
