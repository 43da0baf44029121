"""Where commands print, and the small words they share."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console


def output() -> Console:
    """The console of what a command has to say; made anew, as the stream may have been replaced since."""
    return Console(highlight=False, soft_wrap=True)


def errors() -> Console:
    """The console of errors and warnings."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def split(values: Sequence[str]) -> list[str]:
    """Values of an option that may be given several times or with commas."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def counted(number: int, noun: str) -> str:
    """Return ``1 tensor`` or ``1,234 tensors``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
