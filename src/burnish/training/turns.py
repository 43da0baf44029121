"""Calls of one object that wait for each other, whatever thread they come from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class TakesTurns(Protocol):
    """What has a lock, which a thread may take again while it has it."""

    _lock: threading.RLock


def one_at_a_time(method: Method) -> Method:
    """Let a method wait until another thread's call of the same object is done."""

    @wraps(method)
    def waiting(self: TakesTurns, /, *arguments: Any, **settings: Any) -> Any:
        with self._lock:
            return method(self, *arguments, **settings)

    return cast(Method, waiting)
