"""Reading batches ahead with processes, one thread for each, and futures of the batches in order.

``reading_process`` is the other side.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import IO, Any, NamedTuple, cast

import numpy as np

from burnish import errors
from burnish.data.dataset import Dataset
from burnish.data.reading_process import Request, receive, send
from burnish.errors import BurnishError, ConfigurationError, DataError

AHEAD = 2
"""Most finished batches to hold, besides one in progress per process."""
ENDING_SECONDS = 5.0
LOOK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
"""Longest time a process may stay stopped by a signal; after Ctrl-Z all resume together."""

Batch = dict[str, np.ndarray]


class _Task(NamedTuple):
    """A batch to read, by its number in the epoch. After a failure, no further batch of the epoch is started."""

    future: Future[Batch]
    number: int
    request: Request
    has_failed: threading.Event


Tasks = queue.SimpleQueue[_Task | None]


class ReadAhead:
    """Reads the batches of a dataset in processes, and returns them in order.

    Any free process reads the next batch. Its contents depend only on its request, so the number of processes does not matter.

    Args:
        dataset: the dataset; it is pickled for the processes.
        processes: number of processes.

    Raises:
        ConfigurationError: the dataset cannot be pickled.
    """

    def __init__(self, dataset: Dataset, processes: int):
        try:
            if type(dataset).__module__ == "__main__":
                raise TypeError("its class is of the script that runs: put it into a module")
            content = pickle.dumps(dataset)
        except Exception as error:  # objects can raise any exception when pickled
            raise ConfigurationError(
                f"a data set of type {type(dataset).__name__} cannot be sent to other processes ({error}): read it in this one "
                "(data_workers=0)"
            ) from error
        self._dataset = dataset
        self._processes = [_ReadingProcess(content) for _ in range(processes)]
        self._tasks: Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting: deque[Future[Batch]] = deque()
        self._end = weakref.finalize(self, _end_all, self._processes, self._tasks, self._threads)

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield the batches of requests, in order.

        Raises:
            DataError: a process has ended, or the dataset raised it.
        """
        waiting: deque[Future[Batch]] = deque()
        self._waiting = waiting
        has_failed = threading.Event()
        self._start_threads()
        try:
            for number, request in enumerate(requests):
                waiting.append(Future())
                self._tasks.put(_Task(waiting[-1], number, request, has_failed))
                if len(waiting) > AHEAD + len(self._processes):
                    yield self._result(waiting.popleft())
            while waiting:
                yield self._result(waiting.popleft())
        finally:
            self._cancel(waiting)

    def close(self) -> None:
        """End the processes, after their current batches."""
        self._cancel(self._waiting)
        self._end()

    def _start_threads(self) -> None:
        """Start a daemon thread for each process, once.

        The interpreter would wait for the threads of a ``ThreadPoolExecutor`` at exit, and so for a process stopped by a signal.
        """
        if not self._threads:
            for process in self._processes:
                thread = threading.Thread(target=_fetch, args=(process, self._dataset, self._tasks), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _result(self, future: Future[Batch]) -> Batch:
        self._wait_for([future])
        return future.result()

    def _cancel(self, futures: Iterable[Future[Batch]]) -> None:
        self._wait_for([future for future in futures if not future.cancel()])

    def _wait_for(self, futures: Sequence[Future[Batch]]) -> None:
        """Wait for all futures; kill a process that a signal has stopped for too long."""
        while any(thread.is_alive() for thread in self._threads) and wait(futures, LOOK_SECONDS).not_done:
            for process in self._processes:
                process.give_up_if_stopped()


class _ReadingProcess:
    """A reading process. It starts its imports at once, and gets its dataset with the first request."""

    def __init__(self, content: bytes):
        paths = os.pathsep.join(path for path in sys.path if path)
        # One thread each: the training step already uses the others.
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "burnish.data.reading_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._content: bytes | None = content
        self._stopped_since: float | None = None
        self._is_given_up = False
        _widen(self._output)

    def answer(self, request: Request) -> tuple[dict[str, Any], Batch] | None:
        """Return header and batch of an answer; None if the process is gone."""
        try:
            if self._content is not None:
                self._input.write(self._content)
                self._content = None
            send(self._input, request.header())
            return receive(self._output)
        except (OSError, ValueError):  # its pipe is closed
            return None

    def ended(self) -> str:
        """Describe how an unresponsive process ended."""
        if self._is_given_up:
            return f"stood still for {STOPPED_SECONDS:g} s, stopped by a signal (SIGSTOP),"
        try:
            status = self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def give_up_if_stopped(self) -> None:
        """Kill the process if a signal has stopped it for too long."""
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
        """Let the process end after its current batch."""
        with contextlib.suppress(OSError):
            self._input.close()

    def end(self) -> None:
        """Wait for the process to end, and kill it after a timeout."""
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def _fetch(process: _ReadingProcess, dataset: Dataset, tasks: Tasks) -> None:
    """Read one batch after another with a process, until no task is left."""
    while (task := tasks.get()) is not None:
        if task.has_failed.is_set():
            task.future.cancel()
        if not task.future.set_running_or_notify_cancel():
            continue
        try:
            task.future.set_result(_read(process, dataset, task))
        except BaseException as error:
            task.has_failed.set()
            task.future.set_exception(error)


def _read(process: _ReadingProcess, dataset: Dataset, task: _Task) -> Batch:
    answer = process.answer(task.request)
    if answer is None:
        raise DataError(
            f"a process that reads data {process.ended()} at batch {task.number} of those asked for (process {process.pid}). "
            "What it printed stands above; where memory ran out, take fewer of them, or read in this process (data_workers=0, "
            "--data-workers 0)"
        )
    header, batch = answer
    if "error" in header:
        raise _error(header)
    if header["findings"]:
        dataset.add_findings(header["findings"])  # type: ignore[attr-defined]  # what finds, takes findings
    return batch


def _error(header: dict[str, Any]) -> BaseException:
    kind = getattr(errors, header.get("kind", ""), None)
    if isinstance(kind, type) and issubclass(kind, BurnishError):
        try:
            return kind(header["error"])
        except TypeError:
            pass  # its constructor takes other arguments
    error = DataError(f"the data set raised {header['error']}")
    if "trace" in header:
        error.add_note(header["trace"])
    return error


def _is_stopped(pid: int) -> bool:
    """True if a signal has stopped a child process, if the system can tell."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _widen(pipe: IO[bytes]) -> None:
    """Enlarge a pipe to 1 MiB if possible, so that emptying it takes fewer reads."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)


def _end_all(processes: Sequence[_ReadingProcess], tasks: Tasks, threads: Sequence[threading.Thread]) -> None:
    for process in processes:
        tasks.put(None)
        process.end_input()
    for process in processes:
        process.end()
    for thread in threads:
        thread.join(ENDING_SECONDS)
