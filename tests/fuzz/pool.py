"""Cases in processes of their own: one that crashes, hangs or eats memory takes nothing else with it.

The parent has everything imported and forks a worker for a block of cases. The worker runs under limits of memory and of
processor time for each case, and says what became of each; a worker that is gone before its last case died of the first that it
said nothing of.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fuzz.format_course import FormatCourse
from fuzz.formats import SEALED, formats
from fuzz.mutants import FILES_OF, Mutant, make
from fuzz.outcomes import Kind, Outcome
from fuzz.seeds import seeds
from fuzz.stages import Course

BLOCK = 200
"""Cases of one worker: its memory does not grow for longer."""
PATIENCE = 6.0
"""How much longer a case may last than its processor time: the machine may be busy, but nothing waits forever."""

Make = Callable[[int], Mutant]


@dataclass(frozen=True)
class Limits:
    """What a case may take: seconds of processor time, and bytes of memory beyond what a worker starts with."""

    seconds: float = 10.0
    memory: int = 1 << 30


@dataclass
class _Worker:
    process: int
    connection: Connection
    cases: deque[int]
    log: Path
    since: float


def run(
    numbers: Iterable[int],
    seed: int,
    processes: int,
    limits: Limits,
    is_far: Callable[[int], bool],
    make_mutant: Make | None = None,
) -> Iterator[Outcome]:
    """Run cases and yield what became of each, as it becomes known.

    Args:
        numbers: of the cases.
        seed: of the whole run.
        processes: how many run at once.
        limits: of each case.
        is_far: whether a case goes beyond the first stage.
        make_mutant: makes another mutant of a number than ``seed`` does.
    """
    seeds() if make_mutant is None else formats()
    gc.collect()
    gc.freeze()
    pool = _Pool(iter(numbers), make_mutant or (lambda number: make(seed, number)), limits, is_far)
    with tempfile.TemporaryDirectory() as folder:
        pool.folder = Path(folder)
        try:
            yield from pool.run(processes)
        finally:
            pool.stop()
            gc.unfreeze()


class _Pool:
    folder: Path

    def __init__(self, numbers: Iterator[int], make_mutant: Make, limits: Limits, is_far: Callable[[int], bool]):
        self.numbers = numbers
        self.make_mutant = make_mutant
        self.limits = limits
        self.is_far = is_far
        self.workers: dict[Connection, _Worker] = {}
        self.started = 0

    def run(self, processes: int) -> Iterator[Outcome]:
        for _ in range(processes):
            self._start(self._block())
        while self.workers:
            for connection in wait(list(self.workers), timeout=0.5):
                assert isinstance(connection, Connection)
                worker = self.workers[connection]
                try:
                    outcome: Outcome = connection.recv()
                except (EOFError, ConnectionResetError):
                    yield from self._bury(worker)
                    continue
                worker.cases.popleft()
                worker.since = time.monotonic()
                yield outcome
            for worker in self.workers.values():
                if time.monotonic() - worker.since > self.limits.seconds * PATIENCE:
                    os.kill(worker.process, signal.SIGPROF)  # as if its processor time were up: it says where it is

    def stop(self) -> None:
        for worker in self.workers.values():
            os.kill(worker.process, signal.SIGKILL)
            os.waitpid(worker.process, 0)

    def _block(self) -> deque[int]:
        return deque(islice(self.numbers, BLOCK))

    def _start(self, cases: deque[int]) -> None:
        if not cases:
            return
        receiving, sending = Pipe(duplex=False)
        self.started += 1
        log = self.folder / f"{self.started}.log"
        process = os.fork()
        if process == 0:
            receiving.close()
            os._exit(self._work(cases, sending, log))
        sending.close()
        self.workers[receiving] = _Worker(process, receiving, cases, log, time.monotonic())

    def _bury(self, worker: _Worker) -> Iterator[Outcome]:
        """A worker has closed its end: it is through, or died."""
        del self.workers[worker.connection]
        worker.connection.close()
        _, status = os.waitpid(worker.process, 0)
        if worker.cases:
            yield self._death(worker, status)
            worker.cases.popleft()
        worker.log.unlink(missing_ok=True)
        shutil.rmtree(_home(worker.log), ignore_errors=True)
        self._start(worker.cases or self._block())

    def _death(self, worker: _Worker, status: int) -> Outcome:
        number = worker.cases[0]
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        dump = worker.log.read_text(errors="replace") if worker.log.exists() else ""
        frames = [line.strip() for line in dump.splitlines() if line.strip().startswith("File ")]
        kind = Kind.HANG if ended_by == signal.SIGPROF else Kind.CRASH
        own = next((frame for frame in frames if "/burnish/" in frame), "")
        error = signal.Signals(ended_by).name if ended_by else f"exit {os.WEXITSTATUS(status)}"
        shown = [_short(frame) for frame in (*frames[:1], own)]
        seconds = round(time.monotonic() - worker.since, 3)
        return Outcome(
            number, self.make_mutant(number).seed, kind, "", error, " ".join(dump.split())[:600], " < ".join(shown), seconds
        )

    def _work(self, cases: Iterable[int], sending: Connection, log: Path) -> int:
        """Run cases in the worker."""
        try:
            home = _home(log)
            home.mkdir()
            with log.open("w") as file:
                _prepare(file.fileno(), self.limits)
                for number in cases:
                    signal.setitimer(signal.ITIMER_PROF, self.limits.seconds)
                    sending.send(run_one(self.make_mutant(number), number, self.is_far(number), home))
        except BaseException:  # a defect of the harness: what it says is all that is left of it
            log.write_text(traceback.format_exc())
            return 3
        return 0


def run_one(
    mutant: Mutant, number: int, far: bool, folder: Path, on_error: Callable[[BaseException], object] = lambda error: None
) -> Outcome:
    """Run a case in this process; the folder is there, and empty before and after it."""
    try:
        course = FormatCourse if mutant.form in (FILES_OF, SEALED) else Course
        return course(mutant, folder, on_error).run(number, far)
    finally:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def _home(log: Path) -> Path:
    return log.with_suffix(".case")


def _prepare(log: int, limits: Limits) -> None:
    """Set the limits of this process, silence it, and let it say where it is when it dies."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    faulthandler.enable(file=log, all_threads=False)
    faulthandler.register(signal.SIGPROF, file=log, all_threads=False, chain=True)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    allowed = pages * resource.getpagesize() + limits.memory
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


def _short(frame: str) -> str:
    """``File "/.../inference.py", line 5 in infer`` as ``inference.py:infer``."""
    if '"' not in frame:
        return frame
    return f"{Path(frame.split(chr(34))[1]).name}:{frame.rpartition(' in ')[2]}"
