"""Images with one class each."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.image.augmentation import ImageAugmentation, is_probabilities
from burnish.data.image.decoding import Picture, UnreadableImage
from burnish.data.image.reader import ImageReader, some_of
from burnish.data.model_metadata import DataDescription
from burnish.errors import DataError
from burnish.program import Entry

CHANGES = 2
"""Key of the random stream for augmentation, distinct from those of a ``Loader``."""


class DecodedImages:
    """Image files, read on demand; up to 1 GiB of decoded images is cached.

    An unreadable image is counted and replaced by another; ``remark`` names it.

    Args:
        pictures: the files, in sample order.
        reader: image reader (``reader_for``).
        source: name for errors.
        notes: remarks for the user.

    Attributes:
        preprocessing: complete preprocessing.
        groups: group of each image, or None.
    """

    others = "others"
    """Replacements of unreadable images, in words."""

    def __init__(self, pictures: Sequence[Picture], reader: ImageReader, source: str, notes: Sequence[str] = ()):
        self._pictures, self._reader, self._source, self._notes = list(pictures), reader, source, tuple(notes)
        self.preprocessing = reader.preprocessing
        self._unreadable: dict[int, str] = {}
        self._reported: set[int] = set()
        self.groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._pictures)

    def name_of(self, index: int) -> str:
        """Return the file or archive member of a sample, or of its replacement."""
        return str(self._pictures[next((place for place in self._candidates(index) if place not in self._unreadable), index)])

    @property
    def note(self) -> str | None:
        return f"{self._source}: {'; '.join(self._notes)}" if self._notes else None

    @property
    def remark(self) -> str | None:
        """Note on the unreadable images found so far."""
        if not self._unreadable:
            return None
        names = some_of(self._unreadable[index] for index in sorted(self._unreadable))
        count = f"{len(self._unreadable):,} of {len(self):,}"
        return f"{self._source}: {count} images cannot be read, and {self.others} take their places: {names}"

    @property
    def read_once(self) -> bool:
        """True if all decoded images fit into the cache, so reading ahead is useless after the first epoch."""
        return len(self) <= self._reader.cached_images

    @property
    def divisible(self) -> int:
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        return None

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Self:
        """Return some of the images, with their annotations."""
        part = copy.copy(self)
        places = np.asarray(indices, np.int64).tolist()
        part._pictures = [self._pictures[place] for place in places]
        part._unreadable, part._reported, part.groups = {}, set(), None
        if like is not None:  # only the first part repeats the notes on the whole
            part._notes, part._source = (), f"{self._source} (held out)"
        part._select(self, places)
        return part

    def _select(self, whole: Self, places: Sequence[int]) -> None:
        """Copy the annotations of the images at these places of the whole."""

    @abstractmethod
    def augmented_by(self, augmentation: ImageAugmentation | None) -> Self:
        """Return the same images with random changes in ``augmented``.

        Raises:
            ConfigurationError: the annotations cannot follow a change.
        """

    def take_findings(self) -> dict[str, str]:
        """Return the images found unreadable since the last call, by index, for ``add_findings`` in another process."""
        new = self._unreadable.keys() - self._reported
        self._reported |= new
        return {str(index): self._unreadable[index] for index in sorted(new)}

    def add_findings(self, findings: Mapping[str, str]) -> None:
        """Add the unreadable images that another process found."""
        self._unreadable |= {int(index): reason for index, reason in findings.items()}

    def _candidates(self, index: int) -> Iterator[int]:
        """Yield an image and then its possible replacements, in order."""
        return ((index + step) % len(self) for step in range(len(self)))

    def _kind_of(self, index: int) -> str:
        return "no image"

    def _read(
        self, index: int, augmentation: ImageAugmentation | None = None, generator: np.random.Generator | None = None
    ) -> tuple[int, np.ndarray]:
        for place in self._candidates(index):
            if place in self._unreadable:
                continue
            try:
                return place, self._reader.read(self._pictures[place], augmentation, generator)
            except UnreadableImage as error:
                self._unreadable[place] = error.what
        reason = self._unreadable[index]
        raise DataError(f"{self._source}: {self._kind_of(index)} can be read: {reason}; repair or remove these files")


class LabelledImages(DecodedImages):
    """Images with one class each.

    An unreadable image is counted and replaced by the next one of its class; ``remark`` names it.

    Args:
        pictures: the files, in sample order.
        labels: class index of each image.
        classes: class names.
        spec: inputs of the program; labels are class indices or probabilities [batch, classes].
        reader: image reader (``reader_for``).
        source: name for errors.
        notes: remarks for the user.

    Attributes:
        classes: class names by index.
        augmentation: changes made by ``augmented``, or None.

    Raises:
        DataError: too many classes for the model, or a loss that does not take classes.
    """

    others = "others of their classes"
    by = "class"
    """Origin of the classes, in words."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        labels: Sequence[int],
        classes: Sequence[str],
        spec: DataSpec,
        reader: ImageReader,
        source: str,
        notes: Sequence[str] = (),
    ):
        self._label, self._targets = label_of_images(spec, source)
        super().__init__(pictures, reader, source, notes)
        self.classes = tuple(classes)
        check_class_count(self.classes, spec, source)
        self._classes_of = np.asarray(labels, dtype=np.int64)
        self.augmentation: ImageAugmentation | None = None

    @property
    def note(self) -> str | None:
        notes = list(self._notes)
        counts = np.bincount(self._classes_of, minlength=len(self.classes))
        for count, what in ((0, "no image"), (1, "one image")):
            few = [name for name, images in zip(self.classes, counts.tolist(), strict=False) if images == count]
            if few:
                notes.append(f"{what} of the class{'es' * (len(few) > 1)} {some_of(few)}")
        return f"{self._source}: {'; '.join(notes)}" if notes else None

    @property
    def read_once(self) -> bool:
        crops = self.augmentation is not None and self.augmentation.crop is not None
        return not crops and super().read_once

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        return self._classes_of, self.by

    def _select(self, whole: Self, places: Sequence[int]) -> None:
        self._classes_of = whole._classes_of[places]

    def augmented_by(self, augmentation: ImageAugmentation | None) -> Self:
        changed = copy.copy(self)
        changed.augmentation = augmentation if augmentation is not None and augmentation.changes_images else None
        return changed

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images without augmentation, and their class indices or probabilities.

        Raises:
            DataError: an image has more than 8 bits, or no image of a class can be read.
        """
        return self._batch([self._read(int(index))[1] for index in indices], indices)

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return augmented images. Each one depends only on the seed, the epoch and its index.

        Raises:
            DataError: see ``batch``.
        """
        if self.augmentation is None:
            return self.batch(indices)
        generators = (np.random.default_rng((seed, CHANGES, epoch, int(index))) for index in indices)
        drawn = [self._read(int(index), self.augmentation, each)[1] for index, each in zip(indices, generators, strict=True)]
        return self._batch(drawn, indices)

    def _batch(self, images: Sequence[np.ndarray], indices: np.ndarray) -> dict[str, np.ndarray]:
        classes = self._classes_of[np.asarray(indices, np.int64)]
        if self._targets is None:
            labels = classes.astype(self._label.numpy_dtype)
        else:
            labels = np.zeros((len(classes), self._targets), self._label.numpy_dtype)
            labels[np.arange(len(classes)), classes] = 1
        return {self._reader.entry.name: self._reader.numbers(images), self._label.name: labels}

    def _kind_of(self, index: int) -> str:
        return f"no image of the class '{self.classes[int(self._classes_of[index])]}'"

    def _candidates(self, index: int) -> Iterator[int]:
        yield index
        members = np.flatnonzero(self._classes_of == self._classes_of[index])
        place = int(np.searchsorted(members, index))
        yield from np.roll(members, -place)[1:].tolist()


def label_of_images(spec: DataSpec, source: str, what: str = "images") -> tuple[Entry, int | None]:
    """Return the label input for images of one class each, and its number of probabilities (None for class indices).

    Raises:
        DataError: the loss takes other values.
    """
    label = spec.only_label(source)
    if is_probabilities(spec):
        extent = label.extents[1]
        if not isinstance(extent, int):
            raise DataError(f"{source}: how many classes '{label.name}' has is open: take a model whose outputs are counted")
        return label, extent
    if label.dtype.is_floating_point():
        raise DataError(f"{source}: {what} give classes, and the loss compares with numbers ('{label.name}')")
    return label, None


def check_class_count(classes: Sequence[str], spec: DataSpec, source: str) -> None:
    """Raise DataError if the data have more classes than the model."""
    label, probabilities = label_of_images(spec, source)
    most = probabilities if probabilities is not None else None if label.maximum is None else label.maximum + 1
    if most is not None and len(classes) > most:
        raise DataError(
            f"{source}: {len(classes)} classes ({classes[0]} ... {classes[-1]}), and the model has {most}; take a model with as "
            "many outputs as there are classes"
        )
