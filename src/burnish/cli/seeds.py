"""The same training with several seeds: what its figures are on average, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from burnish.cli.console import output
from burnish.cli.model_options import print_table, write_csv
from burnish.cli.train_options import Course, Results

if TYPE_CHECKING:
    from burnish.training import TrainingResult

TABLE = "seeds.csv"


def check_seeds(seeds: int, results: Results, report: Path | None, workers: int = 1) -> None:
    """Refuse options that mean nothing for several runs.

    Raises:
        typer.BadParameter: such an option was given.
    """
    if seeds == 1:
        return
    if workers > 1:
        raise typer.BadParameter(f"--seeds {seeds} trains one run after the other, and --workers shares each: give one of them")
    if results.export is not None:
        raise typer.BadParameter(
            f"--seeds {seeds}: --export would let each run replace the model of the one before; leave it out, each folder has "
            "its tuned.onnx"
        )
    if report is not None:
        raise typer.BadParameter(
            f"--seeds {seeds}: --report would let each run replace the report of the one before; leave it out, and report a run "
            "by burnish report FOLDER"
        )


def train_with_seeds(
    seeds: int, course: Course, results: Results, folder: Path, train: Callable[[Course, Results], TrainingResult | None]
) -> None:
    """Train with each seed in a folder of its own, and print and write their figures.

    Args:
        seeds: how many; the first is the course's.
        course, results: of the command. With ``--resume``, runs that are there go on and the others begin.
        folder: of all the runs.
        train: trains once.
    """
    if seeds == 1:
        train(course, results)
        return
    from burnish.training.run_files import CheckpointFolder, exported_figures

    console = output()
    figures: dict[int, dict[str, float]] = {}
    tells_best = False
    for seed in range(course.seed, course.seed + seeds):
        console.print(f"seed {seed}, {len(figures) + 1} of {seeds}")
        own = folder / f"seed-{seed}"
        resumes = results.resume and CheckpointFolder(own / "checkpoints").exists
        result = train(replace(course, seed=seed), replace(results, folder=own, resume=resumes))
        if result is not None:
            exported = exported_figures(own, [*result.metrics])
            figures[seed] = exported or result.metrics
            tells_best = tells_best or exported is not None
    names = list(next(iter(figures.values())))
    rows: list[list[Any]] = [[seed, *(values[name] for name in names)] for seed, values in figures.items()]
    columns = [[values[name] for values in figures.values()] for name in names]
    rows += [["mean", *map(statistics.fmean, columns)], ["standard deviation", *map(statistics.stdev, columns)]]
    print_table(console, ["seed", *names], rows)
    write_csv(folder / TABLE, ["seed", *names], rows)
    which = "of the best epoch, which each tuned.onnx holds" if tells_best else "after the last epoch"
    console.print(f"{folder / TABLE}: the figures {which}; the deviation is that of a sample, over n - 1")
