"""The data that a run trains on and evaluates on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.data import DataDescription, Dataset, DataSource, DataSpec, Loader, Text, as_dataset
from burnish.data.loader import Augmentation
from burnish.data.pixel_presets import PixelsLike
from burnish.errors import InputError
from burnish.program import Program
from burnish.training.epoch_length import samples_left_out
from burnish.training.inputs import check_batch


@dataclass(frozen=True)
class RunData:
    """Data sets that fit a program.

    Attributes:
        train: to train on.
        evaluation: to evaluate on after each epoch; None where there is none.
        described: what the training data say of themselves, and the evaluation data are read by.
    """

    train: Dataset
    evaluation: Dataset | None
    described: DataDescription

    @classmethod
    def open(
        cls,
        program: Program,
        train: DataSource,
        evaluation: DataSource | None,
        pixels: PixelsLike | None,
        text: Text | None = None,
    ) -> RunData:
        """Open both sources, as ``Trainer`` takes them.

        Raises:
            DataError: data that cannot be read, or that do not fit the program.
            InputError: data for evaluation that the program does not take: refused now, and not after an epoch of training.
        """
        spec = DataSpec.by(program)
        train_set = as_dataset(train, spec, pixels=pixels, text=text)
        described = DataDescription.of(train_set)
        if evaluation is None:
            return cls(train_set, None, described)
        eval_set = as_dataset(evaluation, spec.like(described), classes=described.classes, text=text)
        try:
            check_batch(program.signature["evaluate"], eval_set.batch(np.arange(1)), part=True)
        except InputError as error:
            raise InputError(f"eval_data: {error}") from error
        return cls(train_set, eval_set, described)

    def training_loader(
        self, program: Program, batch_size: int, seed: int, augment: Augmentation | None, rank: int, workers: int
    ) -> Loader:
        """Return the batches of one worker; a last one that the program does not take is left out."""
        drop_last = samples_left_out(program, len(self.train), batch_size) > 0
        return Loader(self.train, batch_size, seed, drop_last=drop_last, augment=augment, rank=rank, workers=workers)

    def evaluation_loader(self, batch_size: int) -> Loader | None:
        """Return the batches to evaluate on, in order."""
        return None if self.evaluation is None else Loader(self.evaluation, batch_size, shuffle=False)

    def notes(self, program: Program, batch_size: int) -> list[str]:
        """Return what a person wants to know of the data."""
        notes = [note for data in (self.train, self.evaluation) if (note := getattr(data, "note", None)) is not None]
        if rest := samples_left_out(program, len(self.train), batch_size):
            notes.append(f"Each epoch leaves {rest} of its samples out: the program takes no batch of {rest}")
        return notes

    def course(self) -> dict[str, Any]:
        """Return what of the data a run must find again when it is resumed."""
        preprocessing, text = self.described.preprocessing, self.described.text
        course = {"samples": len(self.train), "pixels": None if preprocessing is None else preprocessing.text()}
        return course if text is None else {**course, "text": text.options()}
