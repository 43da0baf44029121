"""Reading batches ahead: processes that read them, a thread for each, and the futures of the batches in their order.

The other side is ``reading_process``.
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
"""Batches that lie ready at most, besides one that each process is at."""
ENDING_SECONDS = 5.0
LOOK_SECONDS = 1.0
STOPPED_SECONDS = 10.0
"""How long a process may stand still by a signal: after Ctrl-Z all go on together."""

Batch = dict[str, np.ndarray]


class _Task(NamedTuple):
    """A batch to be read, by its number in its epoch; nothing of the epoch is begun once a batch of it has failed."""

    future: Future[Batch]
    number: int
    request: Request
    has_failed: threading.Event


Tasks = queue.SimpleQueue[_Task | None]


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
        self._tasks: Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting: deque[Future[Batch]] = deque()
        self._end = weakref.finalize(self, _end_all, self._processes, self._tasks, self._threads)

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield the batches of requests, in their order.

        Raises:
            DataError: a process has ended, or what the data set raises.
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
        """End the processes, after what they are at."""
        self._cancel(self._waiting)
        self._end()

    def _start_threads(self) -> None:
        """Start a thread for each process, once.

        They are daemons, and none of a ``ThreadPoolExecutor``: the interpreter waits for those when it ends, and so for a process
        that a signal has stopped.
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
        """Take back what no process is at, and wait for the rest."""
        self._wait_for([future for future in futures if not future.cancel()])

    def _wait_for(self, futures: Sequence[Future[Batch]]) -> None:
        """Wait until all are done: a process that stays stopped by a signal is killed."""
        while any(thread.is_alive() for thread in self._threads) and wait(futures, LOOK_SECONDS).not_done:
            for process in self._processes:
                process.give_up_if_stopped()


class _ReadingProcess:
    """A process that reads; it begins to import what that needs at once, and gets its data set with the first request."""

    def __init__(self, content: bytes):
        paths = os.pathsep.join(path for path in sys.path if path)
        # One thread each: those of the step are busy already.
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "burnish.data.reading_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._content: bytes | None = content
        self._stopped_since: float | None = None
        self._is_given_up = False
        _widen(self._output)

    def answer(self, request: Request) -> tuple[dict[str, Any], Batch] | None:
        """Return the header and the batch that it answers with; None where it is gone."""
        try:
            if self._content is not None:
                self._input.write(self._content)
                self._content = None
            send(self._input, request.header())
            return receive(self._output)
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
            self._input.close()

    def end(self) -> None:
        """Wait until it has ended, and kill it where it does not."""
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def _fetch(process: _ReadingProcess, dataset: Dataset, tasks: Tasks) -> None:
    """Let a process read one batch after another, until there is no more to do."""
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
    """Return whether a signal has stopped a child of this process, as far as the system tells."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _widen(pipe: IO[bytes]) -> None:
    """Make a pipe hold a mebibyte, where the system can: it is then emptied in fewer turns."""
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
