"""The contents of a report: what a trainer or the folder of a run says, and a model's judgement of samples."""

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
        index: its place in the data set, from 0.
        truth, said: what is right, and what the model says; names of classes, or numbers.
        probability: that the model gives to the right class; None where it gives values.
        error: by which examples are ordered, the larger the worse: the cross-entropy, the squared error, or a count.
        pixels: uint8, [height, width] or [height, width, 3]; None where the sample is no image.
        values: a text, or the numbers of the sample, where it is no image.
        name: of its file; empty where it has none of its own.
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
        """Where the sample is found: its file, or its number."""
        return self.name or f"sample {self.index:,}"


@dataclass(frozen=True)
class Judgement:
    """The judgement of a data set by a model.

    Attributes:
        samples: how many were read.
        classes: their names, in the order of their indices; empty where the model gives values.
        confusion: int64, [right class, class that the model says]; None where there are no classes, or too many.
        worst: the samples that it gets most wrong, the worst first.
        missing: why there is no matrix, or no examples; empty where there are.
        of_pixels: whether classes are those of pixels: the matrix counts these, examples are a picture, its mask and what the
            model says beside each other, ``truth`` and ``said`` the pair of classes that most wrong pixels are of, and ``error``
            the share of these.
        of_boxes: above which score boxes are judged, where these are what the model gives; else None. The matrix counts objects
            and boxes then, its last class is nothing, examples are a picture with its objects and with the boxes beside each
            other, ``truth`` and ``said`` how many of each there are, and ``error`` the objects and boxes that are wrong.
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
    """A tensor of the model: its name, shape and number of elements, and what becomes of it in a step."""

    name: str
    shape: tuple[int, ...]
    size: int
    role: str


@dataclass(frozen=True)
class Contents:
    """The contents of a report.

    Attributes:
        title: of the run.
        rows: of ``metrics.csv``.
        program: what was trained.
        batch_size: samples in a step.
        best: ``epoch``, ``metric`` and ``value`` of the best epoch; None where no epoch was finished.
        stopped: why the run stopped before its last epoch; None where it did not.
        judgement: what the trained model says of ``data``; None where it was not asked.
        data: what the samples are, in words.
        configuration: the file that repeats the run, or other text; None where there is none.
        command: the command line; None for a run in Python.
        environment: names and versions of what computed.
        peak_bytes: the most memory of the process that was resident, in bytes; None where it is not known.
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
        """Return what the folder of a run says.

        Args:
            run: the folder.
            record: what ``burnish train`` noted there, as ``read_record`` returns it.
            judgement, data: what the model says of which samples.
            configuration: the file that repeats the run; None where there is none.

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
        """Loss, metrics and what else a step reports, and then what an evaluation alone does."""
        columns = self.rows[0] if self.rows else {}
        names = [name for name in columns if name not in POSITION_COLUMNS]
        return [*dict.fromkeys(sorted(map(_figure, names), key=lambda name: name not in columns))]

    def points(self, column: str) -> list[tuple[float, float]]:
        """Return (step, value) of a column of the rows."""
        return [(float(row["step"] or 0), float(value)) for row in self.rows if (value := row.get(column)) is not None]

    @property
    def final(self) -> dict[str, tuple[str, float]]:
        """The last figures, each with what it is of: ``evaluation`` data where there are any, else ``training`` data."""
        figures = {}
        for name in self.names:
            for which, column in (("evaluation", EVALUATION_PREFIX + name), ("training", name)):
                if points := self.points(column):
                    figures[name] = which, points[-1][1]
                    break
        return figures

    @property
    def throughput(self) -> list[tuple[float, float]]:
        """(step, samples in a second) between a row and the one before; evaluation counts into the last row of an epoch."""
        points = []
        for before, row in zip(self.rows, self.rows[1:], strict=False):
            seconds = (row["seconds"] or 0) - (before["seconds"] or 0)
            samples = (row["samples"] or 0) - (before["samples"] or 0)
            if seconds > 0 and samples > 0:
                points.append((float(row["step"] or 0), samples / seconds))
        return points

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and statistics of the model: those that a step updates first."""
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
    """The figure that a column of ``metrics.csv`` holds, on whichever data."""
    return column.removeprefix(EVALUATION_PREFIX)


def stages_before(run: Path) -> list[Path]:
    """Return the folders of the stages that a run in a folder goes on from, in their order."""
    numbers = (path.parent.name for path in (run / STAGES).glob(f"*/{TABLE}"))
    return [run / STAGES / number for number in sorted((name for name in numbers if name.isdecimal()), key=int)]


def with_stages(
    stages: Sequence[Path], rows: Sequence[Row], best: Mapping[str, Any] | None
) -> tuple[list[Row], dict[str, Any] | None]:
    """Return the rows of a run and of the stages before it as those of one run, whose counts go on.

    Args:
        stages: folders, in their order.
        rows: of the run itself.
        best: an epoch of the run, or of the ``stage`` that it names, from 1.

    Returns:
        The rows, and the epoch as one of the whole.

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
