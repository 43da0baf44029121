"""Consoles, shared formatting, and lines about programs."""

from __future__ import annotations

import csv
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish.errors import DataError, escaped
from burnish.files.file_writing import replacing

if TYPE_CHECKING:
    from burnish.program import Program
    from burnish.training import Session


MOST_ROWS = 1_000
"""Most rows laid out for a terminal: rich takes a second for so many."""
LONGEST_LINE = 1_000_000
"""Most characters of a line outside a terminal, where a table row is one line."""


class EscapingConsole(Console):
    """A console that prints each text as one line, with control characters from file names escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **options)
        if not self.is_terminal:
            self.width = LONGEST_LINE

    def on_broken_pipe(self) -> None:
        """Continue silently if nobody reads the output, as after ``| head``: a training run still finishes."""
        from burnish.training.progress import drop_output

        drop_output(sys.stderr if self.stderr else sys.stdout)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(escaped(item) if isinstance(item, str) else item for item in objects), **options)


def echo(text: str) -> None:
    """Print a text of any number of lines, unchanged."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        output().on_broken_pipe()


def cell(text: str) -> Text:
    """Return a table cell without markup and with control characters escaped."""
    return Text(escaped(text))


def output(quiet: bool = False) -> Console:
    """Return a console for normal output, created each time as the stream may have been replaced."""
    return EscapingConsole(quiet=quiet)


def errors() -> Console:
    """Return a console for errors and warnings."""
    return EscapingConsole(stderr=True)


LONGEST_FIRST_LINE = 200
"""Most characters in the first line of an error; the remaining text follows on further lines."""
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)'\"\]][.?!]) (?=[A-Z'\"])")


def print_error(message: str, prefix: str = "error: ") -> None:
    """Print an error: the fact in the first line, and the remaining sentences on further lines."""
    first, *details = message_lines(message, LONGEST_FIRST_LINE - len(prefix))
    for line in (prefix + first, *(f"  {line}" for line in details)):
        errors().print(line, style="red")


def message_lines(message: str, longest: int = LONGEST_FIRST_LINE) -> list[str]:
    """Return a message as lines, with at most ``longest`` characters in the first.

    A short message is one line. Otherwise the first line is the first sentence, or ends at the last semicolon, colon, comma or
    space that fits; each later sentence is a line.
    """
    if len(message) <= longest:
        return [message]
    first, rest = _first_part(message, longest)
    return [first, *_SENTENCE_END.split(rest)] if rest else [first]


def _first_part(message: str, longest: int) -> tuple[str, str]:
    if (end := _SENTENCE_END.search(message)) is not None and end.start() <= longest:
        return message[: end.start()], message[end.end() :]
    for mark in ("; ", ": ", ", ", " "):
        place = message.rfind(mark, 0, longest + 1)
        if place >= longest // 8:  # shorter parts, such as the name of an option, are not a fact
            return message[: place + len(mark) - 1], message[place + len(mark) :]
    return message, ""


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Print burnish's own warnings without their line of code."""
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
    """Add the rank of this worker to its warnings."""
    plain = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        return f"[rank {rank}] {plain(message, category, filename, lineno, line)}"

    warnings.formatwarning = formatted


def counted(number: int, noun: str) -> str:
    """Return ``1 tensor`` or ``1,234 tensors``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table with four decimals; it fits into a terminal, otherwise rows are lines of any length."""
    texts = [[f"{value:.4f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    if not console.is_terminal or len(texts) > MOST_ROWS:
        lines = [[escaped(text) for text in line] for line in (header, *texts)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
        echo("\n".join(padded))
        return
    shown = Table(box=None)
    for name in header:
        shown.add_column(cell(name), overflow="fold")
    for line in texts:
        shown.add_row(*map(cell, line))
    console.print(shown)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, numbers with all their digits.

    Raises:
        DataError, CheckpointError: the file cannot be written; an earlier one is untouched.
    """
    make_folder_of(path)
    # File names that are not UTF-8 are escaped, as on the screen.
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def make_folder_of(path: Path) -> None:
    """Create the folder of a file.

    Raises:
        DataError: it cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"'{path}' cannot be written: {error}; choose a file you can write to") from error


LAYERS_SHOWN = 3
"""Most layers named in a line."""
WORTH_A_HINT = 0.1
"""Share of time spent waiting for data from which a hint is printed."""
FIRST_SHARE = 0.1
"""Share of initial weights in the average from which a line reports it."""


def what_trains(program: Program, has_norm_option: bool = True) -> str:
    """Return the trained part of a program in words; ``has_norm_option``: True if the command has ``--norm``."""
    from burnish.program import Role

    signature = program.signature["step"]
    parameters = signature.inputs_of(Role.PARAMETER)
    trained = [entry for entry in parameters if entry.name in signature.updates]
    count = sum(program.weights[entry.name].size for entry in trained)
    rest = len(parameters) - len(trained)
    words = f"{counted(count, 'parameter')} in {counted(len(trained), 'tensor')} train"
    if rest:
        words += f", {counted(rest, 'tensor')} {'stays as it is' if rest == 1 else 'stay as they are'}"
    if frozen := program.options.get("auto_frozen_layers", []):
        shown = ", ".join(frozen[:LAYERS_SHOWN]) + (
            f" and {len(frozen) - LAYERS_SHOWN} more" if len(frozen) > LAYERS_SHOWN else ""
        )
        words += f"; batch normalization of which nothing trains keeps its statistics: {shown}"
        words += " (--norm train lets them move)" if has_norm_option else ""
    for name, why in program.options.get("preparing", {}).items():
        words += f"; frozen: {name} ({why}); train it with --trainable {name}"
    return words


def planned_line(program: Program, batch: int | None = None) -> str:
    """Return a line with the planned memory of a step, with and without recomputation."""
    batch = batch or planned_batch(program)
    peak = program.planned_peak(batch)
    saved = f", {_size(peak.without_recompute)} without recomputation" if program.options.get("recompute") else ""
    memory = program.options.get("memory", {})
    measured = f"; measured: {_size(memory['measured'])} of {_size(memory['limit'])}" if "measured" in memory else ""
    return f"planned peak of a step at batch {batch}: {_size(peak.bytes)}{saved}{measured}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def planned_batch(program: Program) -> int:
    """Return the batch size that memory was planned for, else 1."""
    from burnish.rewriting import recompute_request

    if memory := program.options.get("memory"):
        return int(memory["batch"])
    requested = recompute_request.get(program.options.get("recompute"))
    return requested.batch or 1 if requested else 1


def columns_line(path: Path, session: Session) -> str | None:
    """Return a line on the raw columns that an exported model takes; None if it takes none."""
    from burnish.data.table_graph import fed_by
    from burnish.graph.annotations import COLUMNS

    fed = fed_by(path) if COLUMNS.key in {**session.program.metadata, **session.metadata} else None
    return None if fed is None else f"{path}: {fed}"


def export_line(path: Path, what: str, steps: int, program: Program, fold: bool, parameters: str | None) -> str:
    """Return a line on an exported model, with a warning if batch normalization is folded or the average is young."""
    from burnish import optim
    from burnish.program import Role

    line = f"{path}: {what} after {counted(steps, 'step')}"
    if fold and program.signature["predict"].inputs_of(Role.STATISTIC):
        line += "; batch normalization is folded: to train it further, export with --no-fold"
    first = optim.share_of_first(optim.get(program.options["optimizer"]), steps) if parameters is not None else 0.0
    if first > FIRST_SHARE:
        line += (
            f"; {first:.0%} of the average is still the weights before training: take more steps, a smaller decay, or "
            "bias_correction=true, or export with --no-average"
        )
    return line


def waiting_line(share: float) -> str:
    """Return a line on the share of step time spent waiting for data."""
    line = f"waiting for data: {100 * share:.1f} % of the time of the steps"
    return line + ("; --data-workers reads ahead in processes of its own" if share > WORTH_A_HINT else "")
