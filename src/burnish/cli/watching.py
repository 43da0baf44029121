"""Options of what is written while a run goes on and when it ends, for a person to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup

if TYPE_CHECKING:
    from burnish.training.callbacks import Callback, HtmlReport


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

    def of_seed(self, seed: int, seeds: int) -> Watching:
        """Return these options for one of several runs, whose event files lie in a folder of its own."""
        if seeds == 1 or self.tensorboard is None:
            return self
        return replace(self, tensorboard=self.tensorboard / f"seed-{seed}")

    def loggers(self, parameters: str | None) -> list[Callback]:
        """Return the callbacks that write while a run goes on.

        Args:
            parameters: what is judged, as ``Trainer`` takes it.

        Raises:
            ConfigurationError: a package that one of them needs is not installed.
        """
        from burnish.training.callbacks import TensorBoard

        return [] if self.tensorboard is None else [TensorBoard(self.tensorboard, parameters=parameters)]

    def html_report(self, configuration: str, command: str, parameters: str | None) -> HtmlReport | None:
        """Return the callback that writes the report at the end; None where none is asked for.

        Args:
            configuration, command: what the report shows of the run.
            parameters: what is judged, as ``Trainer`` takes it.
        """
        from burnish.training.callbacks import HtmlReport

        if self.report is None:
            return None
        return HtmlReport(self.report, parameters=parameters, configuration=configuration, command=command)
