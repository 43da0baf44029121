"""The command line: ``python -m fuzz run``, ``formats``, ``replay``, ``minimise``, ``table``."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from fuzz.formats import make_of_format
from fuzz.minimise import minimised
from fuzz.mutants import make
from fuzz.outcomes import DEFECTS, Outcome
from fuzz.pool import Limits, run_one
from fuzz.pool import run as run_cases
from fuzz.tables import Tally, defects_text, outcomes_table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console()
if not console.is_terminal:
    console = Console(width=160)

Seed = Annotated[int, typer.Option(help="Of the whole run.")]
Seconds = Annotated[float, typer.Option(help="Processor time that a case may take.")]
Memory = Annotated[float, typer.Option(help="GiB of memory that a case may take.")]


@app.command()
def run(
    cases: Annotated[int, typer.Option(help="How many.")] = 2000,
    first: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
    seed: Seed = 0,
    processes: Annotated[int, typer.Option(help="How many run at once.")] = 2,
    far_every: Annotated[int, typer.Option(help="One case in so many goes beyond loading.")] = 1,
    seconds: Seconds = 10.0,
    memory: Memory = 1.0,
    results: Annotated[Path | None, typer.Option(help="JSON lines of every defect, and of every outcome with --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Write outcomes that are no defects, too.")] = False,
    tally: Annotated[Path | None, typer.Option(help="JSON file of the counts, written anew every thousand cases.")] = None,
) -> None:
    """Run cases; exit with 1 where there is a defect."""
    limits = Limits(seconds, int(memory * 2**30))
    outcomes = run_cases(range(first, first + cases), seed, processes, limits, lambda number: number % far_every == 0)
    shown = track(outcomes, "Cases", total=cases, console=console, disable=not console.is_terminal)
    _tell(((outcome, outcome.number % far_every == 0) for outcome in shown), results, tally, everything, by_seed=False)


@app.command()
def formats(
    budget: Annotated[float, typer.Option(help="Seconds after which no more cases begin.")] = 60.0,
    cases: Annotated[int, typer.Option(help="How many at most.")] = 1_000_000_000,
    first: Annotated[int, typer.Option(help="Number of the first case.")] = 0,
    only: Annotated[str | None, typer.Option(help="One format, in place of all in turn.")] = None,
    seed: Seed = 0,
    processes: Annotated[int, typer.Option(help="How many run at once.")] = 2,
    seconds: Seconds = 10.0,
    memory: Memory = 1.0,
    results: Annotated[Path | None, typer.Option(help="JSON lines of every defect.")] = None,
    tally: Annotated[Path | None, typer.Option(help="JSON file of the counts.")] = None,
) -> None:
    """Run cases of files that are no models, and of options; exit with 1 where there is a defect."""
    start = time.monotonic()
    numbers = itertools.takewhile(lambda _: time.monotonic() - start < budget, range(first, first + cases))
    limits = Limits(seconds, int(memory * 2**30))
    outcomes = run_cases(numbers, seed, processes, limits, lambda _: True, partial(make_of_format, seed, only=only))
    _tell(((outcome, True) for outcome in outcomes), results, tally, False, by_seed=True)


def _tell(
    outcomes: Iterable[tuple[Outcome, bool]], results: Path | None, tally: Path | None, everything: bool, by_seed: bool
) -> None:
    """Count outcomes, of which some go as far as they come, write them to files, and print tables; exit with 1 for a defect."""
    start, counts = time.monotonic(), Tally()
    defects: dict[tuple[str, ...], list[Outcome]] = {}
    with ExitStack() as stack:
        file = None if results is None else stack.enter_context(results.open("w"))
        for outcome, is_far in outcomes:
            counts.add(outcome, is_far)
            if outcome.is_defect:
                defects.setdefault((outcome.seed, *outcome.group) if by_seed else outcome.group, []).append(outcome)
            if file is not None and (everything or outcome.is_defect):
                file.write(json.dumps(outcome.to_dict()) + "\n")
                file.flush()
            if tally is not None and counts.total % 1000 == 0:
                counts.write(tally, time.monotonic() - start)
    if tally is not None:
        counts.write(tally, time.monotonic() - start)
    console.print(outcomes_table(counts))
    console.print(f"{counts.total:,} cases in {time.monotonic() - start:.0f} s", highlight=False)
    if defects:
        console.print(defects_text(defects), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@app.command()
def replay(
    number: int,
    seed: Seed = 0,
    keep: Annotated[Path | None, typer.Option(help="A new folder for the mutant's files.")] = None,
    of_format: Annotated[bool, typer.Option("--format", help="A case of ``formats``.")] = False,
    only: Annotated[str | None, typer.Option(help="As ``formats`` was run.")] = None,
    limited: Annotated[bool, typer.Option(help="In a process of its own, with its limits: for crashes and hangs.")] = False,
    seconds: Seconds = 10.0,
    memory: Memory = 1.0,
) -> None:
    """Run one case as far as it goes, and show what was done to which model, and every exception."""
    make_mutant = partial(make_of_format, seed, only=only) if of_format or only else partial(make, seed)
    mutant = make_mutant(number)
    console.print(f"{mutant.seed}, given as {mutant.form}:", highlight=False)
    for text in mutant.mutations:
        console.print(f"  {text}", markup=False, highlight=False)
    if keep is not None:
        keep.mkdir(parents=True)
        for name, content in mutant.files.items():
            (keep / name).write_bytes(content)

    def show(error: BaseException) -> None:
        console.print("".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True)

    if limited:
        outcome = next(run_cases([number], seed, 1, Limits(seconds, int(memory * 2**30)), lambda _: True, make_mutant))
    else:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_one(mutant, number, True, Path(folder), show)
    console.print_json(json.dumps(outcome.to_dict()))


@app.command()
def minimise(
    number: int,
    folder: Annotated[Path, typer.Argument(help="A new folder for the files.")],
    seed: Seed = 0,
    seconds: Seconds = 10.0,
    memory: Memory = 1.0,
) -> None:
    """Leave out of a case whatever its defect does not need."""
    files, outcome = minimised(seed, number, Limits(seconds, int(memory * 2**30)))
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sizes = Counter({name: len(content) for name, content in files.items()})
    console.print(f"{outcome.kind}: {outcome.message}", markup=False, highlight=False)
    console.print(f"{sum(sizes.values())} bytes in {folder}", highlight=False)


@app.command()
def table(tallies: list[Path]) -> None:
    """Show the counts of runs, added up."""
    counts = Tally()
    for path in tallies:
        counts.read(path)
    console.print(outcomes_table(counts))
    if any(counts.kinds[kind] for kind in DEFECTS):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
