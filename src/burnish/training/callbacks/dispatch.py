"""The callbacks of one run: called in their order, their errors named, their states in its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.errors import BurnishError, CallbackError, ConfigurationError
from burnish.settings import call_hint
from burnish.training.callbacks.base import Callback, Run


class StoppedByCallback(BaseException):
    """A callback asked for the end of the run, and its state is saved. It leaves no method of the trainer but ``run``."""


class Callbacks:
    """The callbacks of a run.

    Args:
        callbacks: in the order in which they are called.
        is_first: False for a worker that leaves them to the first one.

    Raises:
        ConfigurationError: something among them is no callback.

    Attributes:
        stop_reason: why a callback asked for the end of the run; None where none did.
        tell_steps: whether any callback defines ``on_step_end``.
        tell_checkpoints: whether any defines ``on_checkpoint``.
    """

    def __init__(self, callbacks: Sequence[Callback], is_first: bool = True):
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigurationError(
                    f"callbacks: {callback!r} is no burnish.training.callbacks.Callback{call_hint(callback)}: give objects of "
                    "subclasses of it"
                )
        self._callbacks = list(callbacks) if is_first else []
        self.stop_reason: str | None = None
        self.tell_steps = any(_defines(callback, "on_step_end") for callback in self._callbacks)
        self.tell_checkpoints = any(_defines(callback, "on_checkpoint") for callback in self._callbacks)

    def call(self, event: str, run: Run, *told: Any) -> None:
        """Call a method of all callbacks that define it.

        Raises:
            CallbackError: one of them raised an exception.
        """
        for callback in self._callbacks:
            if _defines(callback, event):
                _call(callback, event, run, *told)

    def end(self, run: Run, error: BaseException | None) -> None:
        """Call ``on_run_end`` of all callbacks, also of those that come after one that fails.

        Raises:
            CallbackError: one raised an exception, and no error is on its way; else it is a note.
        """
        failures: list[BurnishError] = []
        for callback in self._callbacks:
            try:
                _call(callback, "on_run_end", run, error)
            except CallbackError as raised:
                failures.append(raised)
        for failure in failures[error is None :]:
            run.note(str(failure))
        if failures and error is None:
            raise failures[0]

    def states(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps of them.

        Raises:
            CallbackError: a state is not JSON-compatible, or could not be given.
        """
        states = []
        for callback in self._callbacks:
            state = _call(callback, "state")
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise CallbackError(
                    f"The callback {_name(callback)} returned a state that no checkpoint can hold: {error}. Return a dict of "
                    "numbers, texts, lists and dicts"
                ) from error
            if state:
                states.append({"callback": _name(callback), "state": state})
        return states

    def load_states(self, states: object) -> None:
        """Give each callback its state of a checkpoint, by its name and by its place among those of that name.

        Raises:
            CallbackError: one cannot take its state.
        """
        left = [entry for entry in states if isinstance(entry, Mapping)] if isinstance(states, list) else []
        for callback in self._callbacks:
            own = next((entry for entry in left if entry.get("callback") == _name(callback)), None)
            if own is not None:
                left.remove(own)
                _call(callback, "load_state", own.get("state"))


def _name(callback: Callback) -> str:
    return type(callback).__name__


def _defines(callback: Callback, event: str) -> bool:
    return getattr(type(callback), event) is not getattr(Callback, event)


def _call(callback: Callback, event: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, event)(*arguments)
    except CallbackError:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, BurnishError) else f"{type(error).__name__}: {error}"
        raise CallbackError(
            f"The callback {_name(callback)} failed in {event}: {said.rstrip('.')}. Mend it or leave it out"
        ) from error
