"""Images with annotations that have positions, such as boxes and masks. A flip applies to both."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.image.labelled import CHANGES, DecodedImages
from burnish.data.image.reader import ImageReader, some_of
from burnish.errors import ConfigurationError, DataError


class AnnotatedImages(DecodedImages):
    """Images with annotations. An image that cannot be decoded is replaced, with its annotations, by the next readable one.

    Args:
        files, reader, source, notes: see ``DecodedImages``.

    Attributes:
        flip: probability that ``augmented`` mirrors an image.
    """

    def __init__(self, files: Sequence[Path], reader: ImageReader, source: str, notes: Sequence[str] = ()):
        super().__init__(files, reader, source, notes)
        self.flip = 0.0
        if not files:
            detail = f": {'; '.join(notes)}" if notes else ""
            raise DataError(f"{source}: none of its images can be used{detail}")

    def augmented_by(self, augmentation: ImageAugmentation | None) -> Self:
        changed = copy.copy(self)
        if augmentation is not None and (augmentation.crop is not None or augmentation.rand_augment):
            raise ConfigurationError(
                f"augment: boxes and masks follow a flip, and not {augmentation.text()}: leave crop and rand_augment out, or "
                "give a function that changes batches"
            )
        changed.flip = 0.0 if augmentation is None else augmentation.flip
        return changed

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images without augmentation, and their annotations, by the names of the program's inputs.

        Raises:
            DataError: an image has more than 8 bits, or no image can be read.
        """
        return self._batch(indices, np.zeros(len(indices), bool))

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return augmented images. Each one depends only on the seed, the epoch and its index.

        Raises:
            DataError: see ``batch``.
        """
        drawn = [np.random.default_rng((seed, CHANGES, epoch, int(index))).random() for index in indices]
        return self._batch(indices, np.asarray(drawn) < self.flip)

    @abstractmethod
    def annotations(self, places: Sequence[int], flipped: np.ndarray) -> dict[str, np.ndarray]:
        """Return the annotations of images, by input name."""

    def _batch(self, indices: np.ndarray, flipped: np.ndarray) -> dict[str, np.ndarray]:
        read = [self._read(int(index)) for index in indices]
        images = [image[:, ::-1] if flip else image for (_, image), flip in zip(read, flipped, strict=True)]
        annotations = self.annotations([place for place, _ in read], flipped)
        return {self._reader.entry.name: self._reader.numbers(images), **annotations}


class LeftOut:
    """Counts the items that are left out, and names the first ones for each reason."""

    def __init__(self, of: str):
        self._of = of
        self._named: dict[str, list[str]] = {}
        self.total = 0

    def add(self, reason: str, name: object) -> None:
        """Add an item under its reason."""
        self._named.setdefault(reason, []).append(str(name))

    def notes(self) -> list[str]:
        """Return one line for each reason."""
        return [
            f"{len(names):,} of {self.total:,} {self._of} left out, {reason}: {some_of(names)}"
            for reason, names in self._named.items()
        ]


def file_within(root: Path, name: str, source: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        DataError: the name leads out of the folder, or is not a valid file name.
    """
    file = root / name
    try:
        is_within = not Path(name).is_absolute() and file.resolve().is_relative_to(root.resolve())
        # Called for its errors: names that are too long or contain NUL.
        file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{source}: no file can have the name '{name}' ({reason}): correct it") from error
    if not is_within:
        raise DataError(f"{source}: the file name '{name}' leads out of the folder '{root}': files of the data lie in it")
    return file
