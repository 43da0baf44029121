"""What a stage is told, and how it tells what it measured."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
OK, FAILED, SKIPPED, NO_TIME = "ok", "failed", "skipped", "no time"
# Folders of a machine have no place in results.
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.+-]+/)+")
TRACEBACK_LINES = 12


class Skipped(Exception):
    """A case that cannot be had here; the message says what it needs."""


@dataclass(frozen=True)
class Setting:
    """Where a campaign runs, and in which sizes.

    Attributes:
        device: ``cuda`` or ``cpu``.
        tiny: sizes that show that a stage runs, and nothing of speed.
    """

    device: str
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def require_gpu(self) -> None:
        """Raise Skipped where the campaign does not run on a GPU."""
        if not self.on_gpu:
            raise Skipped("needs a GPU")


class Report:
    """Tells the campaign what a stage measures, case by case.

    Args:
        send: takes each message.
        known: rows of an earlier run by their names, which are not measured again.
        deadline: of the clock; cases that would begin after it are left out by name.
        clock: in seconds, the same in every process.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        known: Mapping[str, Row],
        deadline: float,
        clock: Callable[[], float] = time.time,
    ):
        self.clock = clock
        self._send, self._known, self._deadline = send, known, deadline
        self._told: dict[str, Row] = {}

    @property
    def seconds_left(self) -> float:
        return self._deadline - self.clock()

    def known(self, name: str) -> Row | None:
        """What an earlier run measured under this name; None where it did not."""
        return self._known.get(name)

    def measured(self, name: str) -> Row | None:
        """What this run or an earlier one measured under this name; None where neither did."""
        return self._told.get(name) or self.known(name)

    def found(self, findings: Mapping[str, Any]) -> None:
        """Tell what the machine has."""
        self._send({"found": dict(findings)})

    def row(self, name: str, verdict: str, figures: Mapping[str, Any]) -> None:
        """Tell what one case came to; the last row of a name counts."""
        row = {"name": name, "verdict": verdict, **figures}
        if verdict == OK:
            self._told[name] = row
        self._send({"row": row})

    def case(self, name: str, measure: Callable[[], Mapping[str, Any]], needs_seconds: float = 0.0) -> Mapping[str, Any] | None:
        """Measure one case and tell its figures, or why there are none.

        Args:
            name: of its row.
            measure: returns its figures.
            needs_seconds: what it takes, about; where less is left it does not begin, as the stage would be ended within it.

        Returns:
            The figures; None where there are none.
        """
        if name in self._known:
            return self._known[name]
        if self.seconds_left <= needs_seconds:
            self.row(name, NO_TIME, {})
            return None
        began = time.perf_counter()
        try:
            figures = measure()
        except Skipped as reason:
            self.row(name, SKIPPED, {"reason": str(reason)})
        except Exception as error:
            self.failed(name, error)
        else:
            self.row(name, OK, {**figures, "case_seconds": time.perf_counter() - began})
            return figures
        return None

    def failed(self, name: str, error: BaseException) -> None:
        """Tell of a case that failed."""
        self.row(name, FAILED, described(error))


def described(error: BaseException) -> dict[str, str]:
    """An error as results hold it: type and message, and where it was raised."""
    lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return {"error": FOLDERS.sub("", message), "traceback": FOLDERS.sub("", "\n".join(lines))}
