"""Options of what is written while a run goes on and when it ends, for a person to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table

from burnish.cli.console import cell, output
from burnish.cli.option_groups import OptionGroup

if TYPE_CHECKING:
    from burnish.training import Trainer
    from burnish.training.callbacks import Callback, HtmlReport

SHOWN = 20
"""How many nodes of a profile are printed."""


@dataclass(frozen=True)
class Watching(OptionGroup):
    """What is written for a person to look at."""

    panel: ClassVar = "Reports"
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write a report in one HTML file: curves, confusion matrix, worst examples, what was trained, time and memory.",
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Write TensorBoard's event files: scalars, histograms, examples."),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            metavar="WHERE",
            help="Log the run: tensorboard (to events in its folder), mlflow or wandb, with settings behind a colon, such as "
            "mlflow:experiment=digits or wandb:mode=offline; may be given again.",
        ),
    ] = None
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Before training, time some steps on a state of their own: by node of the model as a table and profile.csv, by "
            "node of the step as a trace, profile.trace.json.",
        ),
    ] = False

    def of_seed(self, seed: int, seeds: int) -> Watching:
        """Return these options for one of several runs, whose event files lie in a folder of its own."""
        if seeds == 1 or self.tensorboard is None:
            return self
        return replace(self, tensorboard=self.tensorboard / f"seed-{seed}")

    def of_stage(self, number: int, is_last: bool) -> Watching:
        """Return these options for one of several stages, numbered from 1: the report is that of the last.

        Event files of each lie in a folder of its own, as each counts its steps from 1. A profile is of each: their steps differ.
        """
        folder = None if self.tensorboard is None else self.tensorboard / f"stage-{number}"
        return replace(self, tensorboard=folder, report=self.report if is_last else None)

    def check(self) -> None:
        """Refuse a logger that there is not, before anything is read.

        Raises:
            ConfigurationError: it does not exist, takes no such setting, or needs a package that is not installed.
        """
        from burnish.training.callbacks import check_logger

        for text in self.log or []:
            check_logger(text)

    def loggers(self, folder: Path, parameters: str | None) -> list[Callback]:
        """Return the callbacks that write while a run goes on.

        Args:
            folder: of the run.
            parameters: what is judged, as ``Trainer`` takes it.

        Raises:
            ConfigurationError: a package that one of them needs is not installed.
        """
        from burnish.training.callbacks import TensorBoard, logger

        named: list[Callback] = [logger(text, folder, parameters) for text in self.log or []]
        return named if self.tensorboard is None else [TensorBoard(self.tensorboard, parameters=parameters), *named]

    def html_report(
        self, configuration: str, command: str, parameters: str | None, stages: Sequence[Path] = ()
    ) -> HtmlReport | None:
        """Return the callback that writes the report at the end; None where none is asked for.

        Args:
            configuration, command: what the report shows of the run.
            parameters: what is judged, as ``Trainer`` takes it.
            stages: folders of the runs that this one goes on from.
        """
        from burnish.training.callbacks import HtmlReport

        if self.report is None:
            return None
        return HtmlReport(self.report, parameters=parameters, configuration=configuration, command=command, stages=stages)

    def write_profile(self, trainer: Trainer, folder: Path, device: str | None, threads: int | None) -> None:
        """Time steps on the trainer's first batch, print where their time goes, and write it into the folder of the run.

        Raises:
            EngineError: the engine cannot tell.
        """
        from burnish.data import DataSpec
        from burnish.training.feature_dataset import FeatureDataset
        from burnish.training.profiling import profile, shortened

        dataset = trainer.loader.dataset
        if isinstance(dataset, FeatureDataset):  # whose features are computed when the run begins
            indices = trainer.loader.order(0)[: trainer.loader.batch_size]
            read = DataSpec.by(trainer.program).to_model(dataset.source.batch(indices))
            batch = trainer.session.features.batch(read)
        else:
            batch = next(iter(trainer.loader.epoch(0)))
        session, seed = trainer.session, trainer.loader.seed
        measured = profile(trainer.program, batch, session.engine, device=device, threads=threads, seed=seed)
        console = output()
        table = Table(box=None)
        for number, name in enumerate(("node of the model", "ms", "forward", "backward", "update", "share", "MB")):
            table.add_column(name, overflow="fold", justify="right" if number else "left")
        for source, *times, share, forward, backward, update, _ in shortened(measured.table(), SHOWN):
            moved = f"{(forward + backward + update) / 1e6:,.2f}"
            table.add_row(cell(source), *(f"{time:.3f}" for time in times), f"{share:.1%}", moved)
        console.print(table)
        measured.write_table(folder / "profile.csv")
        measured.write_trace(folder / "profile.trace.json")
        phases = ", ".join(f"{phase} {1000 * seconds:.2f}" for phase, seconds in measured.phases.items())
        took = f"{1000 * measured.step_seconds:.2f} ms a step while it is timed ({phases})"
        trace = folder / "profile.trace.json"
        console.print(f"{folder / 'profile.csv'}, {trace} (for chrome://tracing): {took}, on {measured.engine}")
