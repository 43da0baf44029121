"""The training process' side of reading ahead: processes that read batches, and threads that fetch these."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from burnish import errors
from burnish.data.dataset import Dataset
from burnish.data.reading.frames import Request, receive, send
from burnish.errors import BurnishError, ConfigurationError, DataError

AHEAD = 2
"""Batches that lie ready at most, besides one that each process is at."""
ENDING_SECONDS = 5.0
LOOK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
"""How long a process may stand still by a signal: after Ctrl-Z all go on together."""

Batch = dict[str, np.ndarray]


class ReadAhead:
    """Reads the batches of a data set in processes, in the order in which they are asked for.

    Each batch is read by one process, whichever is free. What a batch holds is a function of its request, so that how many
    processes there are changes nothing.

    Args:
        dataset: what is read; it is pickled for the processes.
        processes: how many.

    Raises:
        ConfigurationError: the data set cannot be pickled.
    """

    def __init__(self, dataset: Dataset, processes: int):
        try:
            if type(dataset).__module__ == "__main__":
                raise TypeError("its class is of the script that runs: put it into a module")
            content = pickle.dumps(dataset)
        except Exception as error:  # pickle raises whatever an object makes it
            raise ConfigurationError(
                f"a data set of type {type(dataset).__name__} cannot be sent to other processes ({error}): read it in this one "
                "(data_workers=0)"
            ) from error
        self._dataset = dataset
        self._processes = [_ReadingProcess(content) for _ in range(processes)]
        self._fetching: _Fetching | None = None
        self._end = weakref.finalize(self, _end_all, self._processes)

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield the batches of requests, in their order.

        Raises:
            DataError: a process has ended, or what the data set raises.
        """
        fetching = self._fetching = _Fetching(self._dataset, self._processes, requests)
        try:
            yield from fetching.batches()
        finally:
            fetching.stop()

    def close(self) -> None:
        """End the processes, after what they are at."""
        if self._fetching is not None:
            self._fetching.stop()
        self._end()


class _ReadingProcess:
    """A process that reads; it begins to import what that needs at once, and gets its data set with the first request."""

    def __init__(self, content: bytes):
        paths = os.pathsep.join(path for path in sys.path if path)
        # One thread each: those of the step are busy already.
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "burnish.data.reading.process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._content: bytes | None = content
        self._stopped_since: float | None = None
        self._is_given_up = False
        _widen(self._process)

    def answer(self, request: Request) -> tuple[dict[str, Any], Batch] | None:
        """Return the header and the batch that it answers with; None where it is gone."""
        process = self._process
        try:
            if self._content is not None:
                process.stdin.write(self._content)  # type: ignore[union-attr]  # both are pipes
                self._content = None
            send(cast(Any, process.stdin), request.header())
            return receive(cast(Any, process.stdout))
        except (OSError, ValueError):  # its pipe is closed
            return None

    def ended(self) -> str:
        """How a process ended that does not answer."""
        if self._is_given_up:
            return f"stood still for {STOPPED_SECONDS:g} s, stopped by a signal (SIGSTOP),"
        try:
            status = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def give_up_if_stopped(self) -> None:
        """Kill it if a signal has stopped it, and it does not go on."""
        if not _is_stopped(self._process.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since >= STOPPED_SECONDS:
            self._is_given_up = True
            self._process.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_input(self) -> None:
        """Let it end after what it is at."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]  # a pipe

    def end(self) -> None:
        """Wait until it has ended, and kill it where it does not."""
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]  # a pipe


class _Fetching:
    """The batches of one epoch: a thread for each process sends it requests and takes the answers."""

    def __init__(self, dataset: Dataset, processes: Sequence[_ReadingProcess], requests: Iterable[Request]):
        self._dataset = dataset
        self._processes = processes
        self._requests = enumerate(requests)
        self._changed = threading.Condition()
        self._ready: dict[int, Batch | BaseException] = {}
        self._asked, self._taken = 0, 0
        self._exhausted = self._stopped = False
        self._threads = [threading.Thread(target=self._fetch, args=(process,), daemon=True) for process in processes]
        self._room = AHEAD + len(processes)
        for thread in self._threads:
            thread.start()

    def batches(self) -> Iterator[Batch]:
        number = 0
        while True:
            with self._changed:
                while not self._changed.wait_for(partial(self._is_settled, number), LOOK_SECONDS):
                    self._give_up_stopped()
                if number not in self._ready:
                    return
                answer = self._ready.pop(number)
                number += 1
                self._taken = number
                self._changed.notify_all()
            if isinstance(answer, BaseException):
                raise answer
            yield answer

    def _is_settled(self, number: int) -> bool:
        """Whether a batch is there, or there is none of this number."""
        return number in self._ready or (self._exhausted and number >= self._asked)

    def stop(self) -> None:
        """Let the threads take the answers under way, and end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                self._give_up_stopped()

    def _give_up_stopped(self) -> None:
        for process in self._processes:
            process.give_up_if_stopped()

    def _fetch(self, process: _ReadingProcess) -> None:
        while (asked := self._next()) is not None:
            number, request = asked
            answer = self._answer(process, number, request)
            with self._changed:
                self._ready[number] = answer
                self._changed.notify_all()
            if isinstance(answer, BaseException):
                return

    def _next(self) -> tuple[int, Request] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._exhausted or self._asked - self._taken < self._room)
            if self._stopped or self._exhausted:
                return None
            try:
                asked = next(self._requests)
            except StopIteration:
                self._exhausted = True
                self._changed.notify_all()
                return None
            self._asked = asked[0] + 1
            return asked

    def _answer(self, process: _ReadingProcess, number: int, request: Request) -> Batch | BaseException:
        answer = process.answer(request)
        if answer is None:
            return DataError(
                f"a process that reads data {process.ended()} at batch {number} of those asked for (process {process.pid}). What "
                "it printed stands above; where memory ran out, take fewer of them, or read in this process (data_workers=0, "
                "--data-workers 0)"
            )
        header, batch = answer
        if "error" in header:
            return _error(header)
        if header["findings"]:
            self._dataset.add_findings(header["findings"])  # type: ignore[attr-defined]  # what finds, takes findings
        return batch


def _error(header: dict[str, Any]) -> BaseException:
    """Return the error that a data set raised in a reading process."""
    kind = getattr(errors, header.get("kind", ""), None)
    if isinstance(kind, type) and issubclass(kind, BurnishError):
        try:
            return kind(header["error"])
        except TypeError:
            pass  # it takes more than a message
    error = DataError(f"the data set raised {header['error']}")
    if "trace" in header:
        error.add_note(header["trace"])
    return error


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a child of this process, as far as the system tells."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Make the pipe from a process hold a mebibyte, where the system can: it is then emptied in fewer turns."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)  # type: ignore[union-attr]  # a pipe


def _end_all(processes: Sequence[_ReadingProcess]) -> None:
    for process in processes:
        process.end_input()
    for process in processes:
        process.end()
