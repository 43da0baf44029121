"""The table of steps: the models that people know, at small batches and large, in one process and in two, beside PyTorch.

    python benchmarks/compare.py --install                       environments of the peers, once
    python benchmarks/table.py --minutes 20                      the rows of most worth first, rounds spread evenly
    python benchmarks/table.py --minutes 20 --resume             the rows that are still missing
    python benchmarks/table.py --models resnet50 --batches 16 1 --peers tuned+pages
    python benchmarks/table.py --table                           write the tables and the picture from the latest result

Contenders are those of ``compare.py`` and, for two workers, of ``data_parallel.py``: processes of their own, whose turns are
interleaved. A time counts only where the losses of the first three steps agree with those of PyTorch eager, or of DDP. What is
told of a contender is its second-least step. A result is written after each row, so that ``--resume`` goes on where a run ended.
burnish is installed from a clone of the commit into a temporary environment; ``--environment FOLDER`` keeps it for the next run.
``--working-tree`` takes a quick look without that, with its result in runs/.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import installation
import table_report
from compare import DISAGREES
from table_plan import BATCHES, WORKERS, Place, Schedule, places
from table_rows import ENGINES, PEERS, TURN_SECONDS, Choice, measure
from workloads import WORKLOADS

MODELS = tuple(table_report.TITLES)
# Of what was measured in a working tree.
LOOKS = installation.CHECKOUT / "runs"
# What `--tiny` sets, where nothing else was asked for: a row of one process and a row of two, for a test.
TINY = {"models": ["mlp"], "batches": [4], "engines": ["standard"], "peers": [], "rounds": 2, "turn_seconds": 0.01}


def run(wanted: Sequence[Place], choice: Choice, schedule: Schedule, path: Path, resume: bool = False) -> list[Place]:
    """Measure rows, and write the result after each.

    Args:
        wanted: the rows, in the order in which they are measured.
        choice: of their contenders.
        schedule: how much time there is.
        path: of the result.
        resume: keep the rows that are there, and measure the others.

    Returns:
        The rows that there was no time for.
    """
    rows = table_report.load(path) if resume else []
    done = {table_report.place_of(row) for row in rows}
    missing = [place for place in wanted if place not in done]
    left_out = []
    for number, place in enumerate(missing):
        told = f"{place.model}, {place.workers} x {place.batch}"
        if not schedule.fits(place):
            left_out.append(place)
            continue
        row = measure(place, choice, schedule, missing[number + 1 :])
        rows.append(row)
        table_report.save(rows, path)
        for contender in row["contenders"]:
            what = contender.get("refused") or f"{1e3 * contender['second_least_seconds']:.3g} ms"
            print(f"{told}: {contender['title']}: {what}", flush=True)
        left = "" if schedule.left is None else f", {schedule.left / 60:.1f} minutes left"
        print(f"{told}: {row['rounds']} rounds{left}", file=sys.stderr, flush=True)
    return left_out


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=list(MODELS), metavar="MODEL")
    made.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="of one process, and of each of two workers")
    made.add_argument("--workers", nargs="+", type=int, choices=(1, WORKERS), default=[1, WORKERS])
    made.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="beside PyTorch eager, which takes part")
    made.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    made.add_argument(
        "--compile-batches", nargs="*", type=int, default=[16, 1], help="of the rows with torch.compile: a minute each"
    )
    made.add_argument("--threads", type=int, default=2, help="of one process; two workers share them")
    made.add_argument("--rounds", type=int, default=7, help="of a row at the most")
    made.add_argument("--turn-seconds", type=float, default=TURN_SECONDS)
    made.add_argument("--minutes", type=float, help="when to end; default: after all rounds of all rows")
    made.add_argument("--resume", action="store_true", help="measure what the result lacks")
    made.add_argument(
        "--output", type=Path, help="the result; default: benchmarks/results/, of today, or with --resume the latest"
    )
    made.add_argument("--save", action="store_true", help="write the tables and the picture at the end")
    made.add_argument("--table", action="store_true", help="write them from the latest result, and stop")
    installation.add_options(made)
    made.add_argument("--tiny", action="store_true", help="a small model and few steps: to see whether all is there")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser()
    if "--tiny" in (sys.argv[1:] if arguments is None else arguments):
        options.set_defaults(**TINY)
    asked = options.parse_args(arguments)
    if asked.table:
        table_report.write(asked.output)
        return
    installation.enter(options, asked, arguments)
    folder = LOOKS if asked.working_tree else table_report.RESULTS
    today = folder / f"{datetime.date.today().isoformat()}-table.json"
    path = asked.output or (asked.resume and table_report.latest(folder)) or today
    choice = Choice(asked.engines, asked.peers, asked.compile_batches, asked.threads, asked.turn_seconds)
    wanted = places(asked.models, asked.batches, asked.workers)
    left_out = run(wanted, choice, Schedule(asked.minutes, asked.rounds), path, asked.resume)
    print(f"saved: {path}", file=sys.stderr)
    for place in left_out:
        print(f"no time for {place.model}, {place.workers} x {place.batch}: --resume", file=sys.stderr)
    if asked.save:
        table_report.write(path)
    disagreeing = [
        f"{row['model']}, {row['workers']} x {row['batch']}: {contender['title']}"
        for row in table_report.load(path)
        for contender in row["contenders"]
        if DISAGREES in contender.get("refused", "") and contender["name"].startswith("burnish")
    ]
    if disagreeing:
        raise SystemExit("losses are not PyTorch's: " + "; ".join(disagreeing))


if __name__ == "__main__":
    main()
