"""Stopping of computations by Ctrl-C, SIGTERM, a time limit, or the end of the interpreter.

Python handles a signal only in the main thread and between two instructions, not during a call of a library. So a separate thread
waits for the signal and stops the run. A run that is nearly done may finish, so that no step is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

GRACE_SECONDS = 2.0
"""Time that a run may continue after Ctrl-C; a second Ctrl-C stops it at once."""
EXIT_SECONDS = 5.0
"""Time that the interpreter waits for runs to stop when it ends."""
AGAIN_SECONDS = 0.25
"""Interval at which an overdue run is stopped again. Python drops exceptions raised in a callback or ``__del__``."""
LOOKS = 20
"""Number of checks during a time limit."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked this process to end, for example from a job scheduler or ``docker stop``.

    It ends as after Ctrl-C, with status 143.
    """


class RunStopped(KeyboardInterrupt):
    """A run was stopped before its end. It changed no state.

    Attributes:
        graph: name of the graph; empty if the engine does not know it.
    """

    graph = ""


class TimePassed(Exception):
    """A run exceeded its time limit. Unlike the built-in TimeoutError, it never means a network file."""


class Stop(Protocol):
    """Stops a run when ``terminate`` is set, like ONNX Runtime's ``RunOptions``."""

    terminate: bool


class PythonStop:
    """Stops a run that consists of many Python calls, between two of them. It belongs to the thread that creates it."""

    __slots__ = ("_is_set", "_thread")

    def __init__(self) -> None:
        self._thread, self._is_set = threading.get_ident(), False

    @property
    def terminate(self) -> bool:
        """True if the run was asked to stop."""
        return self._is_set

    @terminate.setter
    def terminate(self, value: bool) -> None:
        if value:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(RunStopped))
        self._is_set = value


_under_way: dict[int, Stop] = {}
"""Current run of each waiting thread."""
_changes = threading.Lock()
"""Held while a run is removed or stopped, so that no finished run is stopped."""
_is_closing = False
_kept = 0
_waker: socket.socket | None = None


def stoppable(stop: Stop, graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Call ``run(*arguments)`` and return its result, unless ``stop`` ends it first.

    Args:
        stop: stops the run; used for one run at a time.
        graph: name of the graph, for messages.
        run: a computation that changes no state.
        arguments: arguments of ``run``.

    Raises:
        RunStopped: it was stopped.
    """
    thread = threading.get_ident()
    _under_way[thread] = stop
    try:
        try:
            if _is_closing:
                stay_at_exit()
            return run(*arguments)
        finally:
            _end(thread, stop)
    except Exception as error:
        if not stop.terminate:
            raise
        raise _of(graph, RunStopped()) from error
    except RunStopped as stopped:
        raise _of(graph, stopped) from None
    finally:
        if stop.terminate:
            _end(thread, stop)
            stop.terminate = False


def _end(thread: int, stop: Stop) -> None:
    """Unregister a run, so that nothing stops it any more.

    If a ``PythonStop`` came too late for the run, its error is raised here. Cancelling it is no option: Python 3.11 would then
    check for it at every call, and a traced thread, under a debugger for example, would hang at the next one.

    Raises:
        RunStopped: a stop came too late.
    """
    with _changes:
        _under_way.pop(thread, None)
    if stop.terminate:
        for _ in range(100):  # Python raises pending exceptions at the start of an iteration
            pass


def in_python(graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Like ``stoppable``, for a run that consists of many Python calls."""
    return stoppable(PythonStop(), graph, run, *arguments)


def _of(graph: str, stopped: RunStopped) -> RunStopped:
    stopped.graph = graph
    return stopped


def _stop(thread: int, run: Stop) -> None:
    with _changes:
        if _under_way.get(thread) is run:
            run.terminate = True


class _Deadlines:
    """Stops runs at their deadlines. One thread serves all of them and ends when no deadline is left."""

    def __init__(self) -> None:
        self._runs: dict[object, tuple[float, int, Stop]] = {}
        self._changed = threading.Condition()
        self._wakes: float | None = None

    def add(self, key: object, until: float, thread: int, run: Stop) -> None:
        with self._changed:
            self._runs[key] = until, thread, run
            if self._wakes is None:
                threading.Thread(target=self._wait, name="burnish-time-limits", daemon=True).start()
                self._wakes = until
            elif until < self._wakes:
                self._changed.notify()

    def remove(self, key: object) -> None:
        with self._changed:
            self._runs.pop(key, None)

    def _wait(self) -> None:
        with self._changed:
            while self._runs:
                now = time.monotonic()
                for key, (until, thread, run) in list(self._runs.items()):
                    if until <= now:
                        self._runs[key] = now + AGAIN_SECONDS, thread, run
                        _stop(thread, run)
                self._wakes = min((until for until, _, _ in self._runs.values()), default=now)
                self._changed.wait(self._wakes - now)
            self._wakes = None


_deadlines = _Deadlines()


def within_time(seconds: float, run: Callable[[], Result]) -> Result:
    """Call ``run`` in this thread and return its result, within a time limit.

    Args:
        seconds: the limit.
        run: a computation of many Python calls.

    Raises:
        TimePassed: it took longer, and was stopped if possible.
    """
    stop, until = PythonStop(), time.monotonic() + seconds
    _deadlines.add(stop, until, threading.get_ident(), stop)
    try:
        result = stoppable(stop, "", run)
    except RunStopped:
        if time.monotonic() < until:  # Ctrl-C
            raise
        raise TimePassed from None
    finally:
        _deadlines.remove(stop)
    if time.monotonic() >= until:
        raise TimePassed
    return result


@contextlib.contextmanager
def runs_kept() -> Iterator[None]:
    """Within this context, Ctrl-C stops no run: several workers agree on a common last step instead."""
    global _kept
    _kept += 1
    try:
        yield
    finally:
        _kept -= 1


def watch_interrupts() -> None:
    """Let Ctrl-C stop runs in the main thread from now on. Calls from other threads have no effect.

    It also has no effect if another library already handles signals this way, such as asyncio's ``add_signal_handler``.
    """
    global _waker
    if threading.current_thread() is not threading.main_thread():
        return
    if _waker is None:
        receiver, _waker = socket.socketpair()
        _waker.setblocking(False)
        threading.Thread(target=_wait_for_interrupts, args=(receiver,), name="burnish-interrupts", daemon=True).start()
    with contextlib.suppress(ValueError):  # not in the main interpreter
        earlier = signal.set_wakeup_fd(_waker.fileno(), warn_on_full_buffer=False)
        if earlier not in (-1, _waker.fileno()):
            signal.set_wakeup_fd(earlier)


def _wait_for_interrupts(receiver: socket.socket) -> None:
    main = threading.main_thread().ident or 0
    while received := receiver.recv(4096):
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if number in received]
        run = _under_way.get(main)
        # Other handlers may not mean that the program should end.
        if run is None or _kept or not any(map(_stops_runs, handlers)):
            continue
        select.select([receiver], [], [], GRACE_SECONDS)
        _stop(main, run)
    receiver.close()


def _stops_runs(handler: Any) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "stops_runs", False)


class TimeLimit:
    """A context that stops a run in this thread if it exceeds a time limit.

    Args:
        seconds: the limit, above 0.

    Attributes:
        is_passed: True if a run exceeded the limit since the context was last entered.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.is_passed = False
        self._thread: int | None = None
        self._closed: threading.Event | None = None

    def __enter__(self) -> None:
        if self._closed is None:
            self._closed = threading.Event()
            threading.Thread(target=self._look, args=(self._closed,), name="burnish-time-limit", daemon=True).start()
        self.is_passed, self._thread = False, threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._thread = None

    def close(self) -> None:
        """End the watching thread."""
        if self._closed is not None:
            self._closed.set()
            self._closed = None

    def _look(self, closed: threading.Event) -> None:
        seen: Stop | None = None
        until = 0.0
        while not closed.wait(self.seconds / LOOKS):
            thread = self._thread
            run = None if thread is None else _under_way.get(thread)
            if run is not seen:
                seen, until = run, time.monotonic() + self.seconds
            elif thread is not None and run is not None and time.monotonic() > until:
                self.is_passed = True
                _stop(thread, run)


def is_ending() -> bool:
    """True if this thread is a daemon and the interpreter is ending."""
    return _is_closing and threading.current_thread().daemon


def stay_at_exit() -> None:
    """Block this thread for ever if the interpreter is ending.

    The interpreter kills daemon threads when they return to Python. If one returns from a C++ library, the whole process aborts
    with SIGABRT.
    """
    if is_ending():
        _under_way.pop(threading.get_ident(), None)
        threading.Event().wait()


@atexit.register
def close() -> None:
    """Stop the runs of daemon threads and allow no new ones."""
    global _is_closing
    _is_closing = True
    until = time.monotonic() + EXIT_SECONDS
    ending = {thread.ident for thread in threading.enumerate() if thread.daemon}
    while runs := [(thread, run) for thread, run in list(_under_way.items()) if thread in ending]:
        for thread, run in runs:
            _stop(thread, run)
        if time.monotonic() > until:
            break
        time.sleep(0.001)


@atexit.register
def _stop_watching() -> None:
    global _waker
    if _waker is not None and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(ValueError):
            earlier = signal.set_wakeup_fd(-1)
            if earlier != _waker.fileno():
                signal.set_wakeup_fd(earlier)
        _waker.close()
        _waker = None


def _forget_in_child() -> None:
    """Reset the state in a forked process: it has none of its parent's threads and must not wake the parent's."""
    global _waker, _changes, _deadlines
    _changes, _deadlines = threading.Lock(), _Deadlines()
    _stop_watching()
    _under_way.clear()
    _waker = None
    if "onnxruntime" in sys.modules:
        _exit_without_library()


def _exit_without_library() -> None:
    """Exit this process without ONNX Runtime's exit handlers: they wait for a thread that a forked process does not have."""
    with contextlib.suppress(AttributeError):  # a C library without on_exit
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        library.on_exit(library.fcloseall, None)  # called first


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
