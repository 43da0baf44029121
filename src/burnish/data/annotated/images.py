"""Images whose annotations have places in them: what is done to an image is done to these too."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.image.decoding import UnreadableImage
from burnish.data.image.labelled import CHANGES
from burnish.data.image.reader import ImageReader, some_of
from burnish.errors import ConfigurationError, DataError


class AnnotatedImages:
    """Images that are read when they are asked for; decoded ones are kept while they fit into 1 GiB.

    An image that cannot be decoded is replaced by the next that can, with its annotations, and counted: ``remark`` names it.

    Args:
        files: in the order of the samples.
        reader: reads them (``reader_for``).
        source: what to call the data in an error.
        notes: what a person should know of the data.

    Attributes:
        preprocessing: what is done to an image, with nothing left open.
        flip: how often ``augmented`` lets left and right change places.
    """

    def __init__(self, files: Sequence[Path], reader: ImageReader, source: str, notes: Sequence[str] = ()):
        self._files, self._reader, self._source, self._notes = list(files), reader, source, tuple(notes)
        self.preprocessing = reader.preprocessing
        self.flip = 0.0
        self._unreadable: dict[int, str] = {}
        self._reported: set[int] = set()
        if not self._files:
            detail = f": {'; '.join(notes)}" if notes else ""
            raise DataError(f"{source}: none of its images can be used{detail}")

    def __len__(self) -> int:
        return len(self._files)

    def name_of(self, index: int) -> str:
        """Return the file that a sample is read from: the next that can be, where its own cannot."""
        places = ((index + step) % len(self) for step in range(len(self)))
        return str(self._files[next((place for place in places if place not in self._unreadable), index)])

    @property
    def note(self) -> str | None:
        """What a person should know of the data."""
        return f"{self._source}: {'; '.join(self._notes)}" if self._notes else None

    @property
    def remark(self) -> str | None:
        """What became known of the data as they were read: images that could not be."""
        if not self._unreadable:
            return None
        names = some_of(self._unreadable[index] for index in sorted(self._unreadable))
        count = f"{len(self._unreadable):,} of {len(self):,}"
        return f"{self._source}: {count} images cannot be read, and others take their places: {names}"

    @property
    def read_once(self) -> bool:
        """Whether images are decoded once and kept."""
        return len(self) <= self._reader.cached_images

    def augmented_by(self, augmentation: ImageAugmentation | None) -> AnnotatedImages:
        """Return the same images, which ``augmented`` flips at random.

        Raises:
            ConfigurationError: a change that the annotations do not follow.
        """
        changed = copy.copy(self)
        if augmentation is not None and (augmentation.crop is not None or augmentation.rand_augment):
            raise ConfigurationError(
                f"augment: boxes and masks follow a flip, and not {augmentation.text()}: leave crop and rand_augment out, or "
                "give a function that changes batches"
            )
        changed.flip = 0.0 if augmentation is None else augmentation.flip
        return changed

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images as they are, and their annotations, by the names of the program's inputs.

        Raises:
            DataError: an image of more than 8 bits, or none can be read.
        """
        return self._batch(indices, np.zeros(len(indices), bool))

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return images as an epoch of training has them; each is a function of seed, epoch and its index.

        Raises:
            DataError: as ``batch``.
        """
        drawn = [np.random.default_rng((seed, CHANGES, epoch, int(index))).random() for index in indices]
        return self._batch(indices, np.asarray(drawn) < self.flip)

    def take_findings(self) -> dict[str, str]:
        """Return the images that were found unreadable since the last call, by index, for ``add_findings`` of another process."""
        new = self._unreadable.keys() - self._reported
        self._reported |= new
        return {str(index): self._unreadable[index] for index in sorted(new)}

    def add_findings(self, findings: Mapping[str, str]) -> None:
        """Take over what another process found."""
        self._unreadable |= {int(index): reason for index, reason in findings.items()}

    @abstractmethod
    def annotations(self, places: Sequence[int], flipped: np.ndarray) -> dict[str, np.ndarray]:
        """Return the annotations of images, by the names of the inputs."""

    def _batch(self, indices: np.ndarray, flipped: np.ndarray) -> dict[str, np.ndarray]:
        read = [self._read(int(index)) for index in indices]
        images = [image[:, ::-1] if flip else image for (_, image), flip in zip(read, flipped, strict=True)]
        annotations = self.annotations([place for place, _ in read], flipped)
        return {self._reader.entry.name: self._reader.numbers(images), **annotations}

    def _read(self, index: int) -> tuple[int, np.ndarray]:
        """Return an image and its place, or the next that can be read."""
        for step in range(len(self)):
            place = (index + step) % len(self)
            if place in self._unreadable:
                continue
            try:
                return place, self._reader.read(self._files[place])
            except UnreadableImage as error:
                self._unreadable[place] = error.what
        raise DataError(f"{self._source}: no image can be read: {self._unreadable[index]}; repair or remove these files")


class LeftOut:
    """Counts what is left out of data, and names the first of each reason."""

    def __init__(self, of: str):
        self._of = of
        self._named: dict[str, list[str]] = {}
        self.total = 0

    def add(self, reason: str, name: object) -> None:
        """Note one."""
        self._named.setdefault(reason, []).append(str(name))

    def notes(self) -> list[str]:
        """Return a line for each reason."""
        return [
            f"{len(names):,} of {self.total:,} {self._of} left out, {reason}: {some_of(names)}"
            for reason, names in self._named.items()
        ]


def file_within(root: Path, name: str, source: str) -> Path:
    """Return the file of a name in a folder.

    Raises:
        DataError: the name leads out of the folder, or no file can have it.
    """
    file = root / name
    try:
        is_within = not Path(name).is_absolute() and file.resolve().is_relative_to(root.resolve())
        file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{source}: no file can have the name '{name}' ({reason}): correct it") from error
    if not is_within:
        raise DataError(f"{source}: the file name '{name}' leads out of the folder '{root}': files of the data lie in it")
    return file
