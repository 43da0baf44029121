"""The contents of a report: data of a trainer or a run folder, and a model's evaluation on samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish.files.saving import load
from burnish.program import Program, Role
from burnish.training.run_files import exported_epoch
from burnish.training.run_results import COUNTS, EVALUATION_PREFIX, POSITION_COLUMNS, STAGES, TABLE, Row, read_rows


@dataclass(frozen=True)
class Example:
    """A sample that the model gets wrong.

    Attributes:
        index: its index in the data set, from 0.
        truth, said: the right answer and the model's; names of classes, or numbers.
        probability: probability of the right class; None if the model gives values.
        error: sort key, larger is worse: the cross-entropy, the squared error, or a count.
        pixels: uint8, [height, width] or [height, width, 3]; None if the sample is no image.
        values: a text, or the numbers of the sample, if it is no image.
        name: name of its file, or empty.
    """

    index: int
    truth: str
    said: str
    probability: float | None
    error: float
    pixels: np.ndarray | None
    values: str
    name: str = ""

    @property
    def place(self) -> str:
        """The file or the number of the sample."""
        return self.name or f"sample {self.index:,}"


@dataclass(frozen=True)
class Judgement:
    """The evaluation of a model on a data set.

    Attributes:
        samples: number of samples read.
        classes: names in the order of their indices; empty if the model gives values.
        confusion: int64, [right class, predicted class]; None if there are no classes, or too many.
        worst: the samples with the largest errors, the worst first.
        missing: reason for a missing matrix or missing examples; empty if nothing is missing.
        of_pixels: True if pixels are classified: the matrix counts pixels, and an example shows an image, its mask and the
            prediction side by side, with ``truth`` and ``said`` the most common wrong pair of classes, and ``error`` the share of
            wrong pixels.
        of_boxes: score threshold of the boxes of a detector, else None. The matrix then counts objects and boxes, with "nothing"
            as the last class; an example shows an image with its objects and with the boxes, side by side; ``truth`` and ``said``
            are their counts, and ``error`` the number of wrong objects and boxes.
    """

    samples: int
    classes: tuple[str, ...]
    confusion: np.ndarray | None
    worst: tuple[Example, ...]
    missing: str = ""
    of_pixels: bool = False
    of_boxes: float | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: name, shape, number of elements, and role in a step."""

    name: str
    shape: tuple[int, ...]
    size: int
    role: str


@dataclass(frozen=True)
class Contents:
    """The contents of a report.

    Attributes:
        title: title of the run.
        rows: rows of ``metrics.csv``.
        program: the trained program.
        batch_size: samples per step.
        best: ``epoch``, ``metric`` and ``value`` of the best epoch; None if no epoch was finished.
        stopped: reason for an early stop, or None.
        judgement: evaluation of the trained model on ``data``, or None.
        data: the samples, in words.
        configuration: configuration file that repeats the run, or other text, or None.
        command: command line; None for a run in Python.
        environment: names and versions of the software and machine.
        peak_bytes: peak resident memory of the process in bytes; None if unknown.
    """

    title: str
    rows: Sequence[Row]
    program: Program
    batch_size: int
    best: Mapping[str, Any] | None = None
    stopped: str | None = None
    judgement: Judgement | None = None
    data: str = ""
    configuration: str | None = None
    command: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None

    @classmethod
    def of_folder(
        cls, run: Path, record: Mapping[str, Any], judgement: Judgement, data: str, configuration: str | None
    ) -> Contents:
        """Return the contents from the folder of a run.

        Args:
            run: the folder.
            record: notes of ``burnish train`` there, as from ``read_record``.
            judgement, data: evaluation of the model, and its samples in words.
            configuration: configuration file that repeats the run, or None.

        Raises:
            CheckpointError: the program or the table of figures cannot be read.
        """
        ending = record.get("result") or {}
        best = exported_epoch(ending.get("tuned")) or ending.get("best")
        rows, best = with_stages(stages_before(run), read_rows(run / TABLE), best)
        return cls(
            title=run.resolve().name,
            rows=rows,
            program=load(run / "program"),
            batch_size=int(record.get("batch_size") or 1),
            best=best,
            stopped=ending.get("stopped"),
            judgement=judgement,
            data=data,
            configuration=configuration,
            command=record.get("command"),
            environment=record.get("environment") or {},
            peak_bytes=ending.get("peak_bytes"),
        )

    @property
    def names(self) -> list[str]:
        """The figures of steps (loss, metrics and others), followed by those of evaluations only."""
        columns = self.rows[0] if self.rows else {}
        names = [name for name in columns if name not in POSITION_COLUMNS]
        return [*dict.fromkeys(sorted(map(_figure, names), key=lambda name: name not in columns))]

    def points(self, column: str) -> list[tuple[float, float]]:
        """Return (step, value) of a column of the rows."""
        return [(float(row["step"] or 0), float(value)) for row in self.rows if (value := row.get(column)) is not None]

    @property
    def final(self) -> dict[str, tuple[str, float]]:
        """The last figures, each with its data: ``evaluation`` if there are any, else ``training``."""
        figures = {}
        for name in self.names:
            for which, column in (("evaluation", EVALUATION_PREFIX + name), ("training", name)):
                if points := self.points(column):
                    figures[name] = which, points[-1][1]
                    break
        return figures

    @property
    def throughput(self) -> list[tuple[float, float]]:
        """(step, samples per second) between successive rows; evaluation time counts in the last row of an epoch."""
        points = []
        for before, row in zip(self.rows, self.rows[1:], strict=False):
            seconds = (row["seconds"] or 0) - (before["seconds"] or 0)
            samples = (row["samples"] or 0) - (before["samples"] or 0)
            if seconds > 0 and samples > 0:
                points.append((float(row["step"] or 0), samples / seconds))
        return points

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and statistics of the model, those updated by steps first."""
        signature = self.program.signature["step"]
        tensors = []
        for entry in signature.inputs_of(Role.PARAMETER, Role.STATISTIC):
            is_updated = entry.name in signature.updates
            kind = "trained" if is_updated else "frozen"
            if entry.role is Role.STATISTIC:
                kind = "statistic that moves" if is_updated else "statistic that stays"
            shape = tuple(extent for extent in entry.extents if isinstance(extent, int))
            size = 1
            for extent in shape:
                size *= extent
            tensors.append(Tensor(entry.name.partition("/")[2], shape, size, kind))
        order = ("trained", "frozen", "statistic that moves", "statistic that stays")
        return sorted(tensors, key=lambda tensor: order.index(tensor.role))

    @property
    def reached(self) -> dict[str, float]:
        """Steps, epochs, samples and seconds of the whole run."""
        last = self.rows[-1] if self.rows else {}
        return {name: float(last.get(name) or 0) for name in (*sorted(COUNTS), "seconds")}


def _figure(column: str) -> str:
    return column.removeprefix(EVALUATION_PREFIX)


def stages_before(run: Path) -> list[Path]:
    """Return the folders of the stages before a run, in order."""
    numbers = (path.parent.name for path in (run / STAGES).glob(f"*/{TABLE}"))
    return [run / STAGES / number for number in sorted((name for name in numbers if name.isdecimal()), key=int)]


def with_stages(
    stages: Sequence[Path], rows: Sequence[Row], best: Mapping[str, Any] | None
) -> tuple[list[Row], dict[str, Any] | None]:
    """Return the rows of a run and its earlier stages as one run with continuous counts.

    Args:
        stages: folders in order.
        rows: rows of the run itself.
        best: an epoch of the run, or of the ``stage`` that it names, from 1.

    Returns:
        The rows, and the epoch counted over the whole.

    Raises:
        CheckpointError: the table of a stage cannot be read.
    """
    joined: list[Row] = []
    epochs = []
    for part in (*(read_rows(stage / TABLE) for stage in stages), rows):
        last = joined[-1] if joined else {}
        before = {name: last.get(name) or 0 for name in (*COUNTS, "seconds")}
        epochs.append(int(before["epoch"]))
        joined += [{**row, **{name: (row.get(name) or 0) + before[name] for name in before}} for row in part]
    if best is None:
        return joined, None
    stage = best.get("stage")
    return joined, {**best, "epoch": best["epoch"] + epochs[-1 if stage is None else stage - 1]}
