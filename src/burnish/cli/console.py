"""Where commands print, and the small words they share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from burnish.errors import escaped

LONGEST_LINE = 1_000_000
"""Characters of a line where nobody sees a terminal: in a pipe or a file a row of a table is a line."""


class EscapingConsole(Console):
    """Prints a text as it is, as one line. What would steer the terminal, in names from files, is written out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **options)
        if not self.is_terminal:
            self.width = LONGEST_LINE

    def on_broken_pipe(self) -> None:
        """Go on without a word where nobody reads the output any more, as after ``| head``: a run that trains still ends well."""
        from burnish.training.progress import drop_output

        drop_output(sys.stderr if self.stderr else sys.stdout)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(escaped(item) if isinstance(item, str) else item for item in objects), **options)


def echo(text: str) -> None:
    """Print a text as it is, of any number of lines."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        output().on_broken_pipe()


def cell(text: str) -> Text:
    """Return a cell of a table: nothing in it is markup, and nothing steers the terminal."""
    return Text(escaped(text))


def output(quiet: bool = False) -> Console:
    """Return the console of what a command has to say. It is made anew, as the stream may have been replaced since."""
    return EscapingConsole(quiet=quiet)


def errors() -> Console:
    """Return the console of errors and warnings."""
    return EscapingConsole(stderr=True)


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Let burnish's own warnings be printed as what they say, without the line of code that they come from."""
    plain = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        is_own = category.__module__.startswith("burnish.")
        return f"warning: {message}\n" if is_own else plain(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = plain


def warn_with_rank(rank: int) -> None:
    """Let the warnings of this worker name its rank."""
    plain = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        return f"[rank {rank}] {plain(message, category, filename, lineno, line)}"

    warnings.formatwarning = formatted


def counted(number: int, noun: str) -> str:
    """Return ``1 tensor`` or ``1,234 tensors``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
