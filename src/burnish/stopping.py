"""Stop a computation by Ctrl-C, by SIGTERM, by a limit of time, or at the end of the interpreter.

Python hears a signal only in the main thread, between two of its own instructions, and not while a library computes there. So a
thread waits for the signal and stops the run. It lets a run that is nearly over finish, so that no step is lost.
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
"""How long a run may go on after Ctrl-C; a second one stops it at once."""
EXIT_SECONDS = 5.0
"""How long the interpreter waits for a run to stop when it ends."""
AGAIN_SECONDS = 0.25
"""How long after its limit a run is stopped again. Python drops an exception that is raised in a callback or ``__del__``."""
LOOKS = 20
"""How often a limit of time is checked while it passes."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked this process to end, as a scheduler of jobs or ``docker stop`` does. It ends as at Ctrl-C, by status 143."""


class RunStopped(KeyboardInterrupt):
    """A run was stopped before its end. It has changed no state.

    Attributes:
        graph: the graph that ran; empty if the engine does not say.
    """

    graph = ""


class TimePassed(Exception):
    """A run took longer than it may. The built-in TimeoutError means a file of a network, too."""


class Stop(Protocol):
    """Stops a run when ``terminate`` is set, as ONNX Runtime's ``RunOptions`` do."""

    terminate: bool


class PythonStop:
    """Stops a run of many calls from Python between two of them; it belongs to the thread that makes it."""

    __slots__ = ("_is_set", "_thread")

    def __init__(self) -> None:
        self._thread, self._is_set = threading.get_ident(), False

    @property
    def terminate(self) -> bool:
        """Whether the run was told to stop."""
        return self._is_set

    @terminate.setter
    def terminate(self, value: bool) -> None:
        if value:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(RunStopped))
        self._is_set = value


_under_way: dict[int, Stop] = {}
"""Runs by the threads that wait for them."""
_changes = threading.Lock()
"""Is held while a run is taken out, and while one is stopped: none is stopped that has ended."""
_is_closing = False
_kept = 0
_waker: socket.socket | None = None


def stoppable(stop: Stop, graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Call ``run(*arguments)`` and return its result, unless ``stop`` ends it first.

    Args:
        stop: stops the run. It serves one run at a time.
        graph: the name of the graph, for messages.
        run: computes without a change of state.
        arguments: of ``run``.

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
    """From here on, nothing stops the run. If a ``PythonStop`` came too late for the run, its error is raised here.

    Taking that error back would be a trap: Python 3.11 then looks for it at every call, and a thread that is traced, by a
    debugger for example, never gets past the next one.

    Raises:
        RunStopped: a stop came too late.
    """
    with _changes:
        _under_way.pop(thread, None)
    if stop.terminate:
        for _ in range(100):  # Python raises what is pending where a loop begins again
            pass


def in_python(graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Like ``stoppable``, for a run that consists of many calls from Python."""
    return stoppable(PythonStop(), graph, run, *arguments)


def _of(graph: str, stopped: RunStopped) -> RunStopped:
    stopped.graph = graph
    return stopped


def _stop(thread: int, run: Stop) -> None:
    """Stop a run unless it has ended."""
    with _changes:
        if _under_way.get(thread) is run:
            run.terminate = True


class _Deadlines:
    """Stops runs at their times. One thread serves all of them, and ends when there is nothing left to wait for."""

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
    """Call ``run`` in this thread and return its result, unless it takes too long.

    Args:
        seconds: the limit.
        run: consists of many calls from Python.

    Raises:
        TimePassed: it took longer, and was stopped if it could be.
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
    """While this is entered, Ctrl-C stops no run: several workers end after the same step, which they agree on."""
    global _kept
    _kept += 1
    try:
        yield
    finally:
        _kept -= 1


def watch_interrupts() -> None:
    """Let Ctrl-C stop a run in the main thread from here on; called there, else nothing is done.

    Nothing is done either where something else listens for signals in the same way, as asyncio's ``add_signal_handler`` does.
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
        # Another handler may mean something else by it than the end.
        if run is None or _kept or not any(map(_stops_runs, handlers)):
            continue
        select.select([receiver], [], [], GRACE_SECONDS)
        _stop(main, run)
    receiver.close()


def _stops_runs(handler: Any) -> bool:
    return handler is signal.default_int_handler or getattr(handler, "stops_runs", False)


class TimeLimit:
    """While it is entered, a run in this thread is stopped when it takes longer than so many seconds.

    Args:
        seconds: more than 0.

    Attributes:
        is_passed: whether one took longer, since it was last entered.
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
        """End the thread that looks."""
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
    """Whether this thread ends with the interpreter, now."""
    return _is_closing and threading.current_thread().daemon


def stay_at_exit() -> None:
    """Let this thread wait for ever if it ends with the interpreter.

    The interpreter ends a daemon thread when that next comes back to Python, and with it the process, by SIGABRT, if it comes
    back from a library in C++.
    """
    if is_ending():
        _under_way.pop(threading.get_ident(), None)
        threading.Event().wait()


@atexit.register
def close() -> None:
    """Stop what daemon threads compute, and let nothing begin there any more."""
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
    """A forked process has none of the threads of its parent, and is not to wake the parent's."""
    global _waker, _changes, _deadlines
    _changes, _deadlines = threading.Lock(), _Deadlines()
    _stop_watching()
    _under_way.clear()
    _waker = None
    if "onnxruntime" in sys.modules:
        _exit_without_library()


def _exit_without_library() -> None:
    """Let this process end without what ONNX Runtime does last: it waits for a thread that a forked process does not have."""
    with contextlib.suppress(AttributeError):  # a C library without on_exit
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)
        library.on_exit(library.fcloseall, None)  # called first


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
