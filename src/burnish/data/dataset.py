"""Dataset protocols, and the dataset of arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from burnish.data.file_rows import file_rows
from burnish.data.label_coding import LabelDescription
from burnish.data.part import Part
from burnish.data.preprocessing import Preprocessing
from burnish.data.table_coding import TableDescription
from burnish.errors import DataError

if TYPE_CHECKING:
    from burnish.data.model_metadata import DataDescription
    from burnish.program import Entry


@runtime_checkable
class Dataset(Protocol):
    """Samples with random access. Any class with these two methods is a dataset."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices`` (int64, [n]) as arrays by input name, the sample axis first."""
        ...


@runtime_checkable
class EpochDataset(Dataset, Protocol):
    """A dataset that chooses its own order and may change its samples from epoch to epoch.

    Both methods depend only on their arguments, so a run can resume anywhere and all workers agree.
    """

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Return all sample indices in the order of an epoch, int64 [samples]."""
        ...

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return a batch of an epoch; ``batch`` returns that of seed 0 and epoch 0."""
        ...


@runtime_checkable
class AugmentedDataset(Dataset, Protocol):
    """A dataset that augments each training sample at random. ``batch`` returns unchanged samples, for evaluation."""

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return augmented samples at ``indices``; each depends only on the seed, the epoch and its index."""
        ...


@runtime_checkable
class DividedDataset(Dataset, Protocol):
    """A dataset that can be split by class or by group, such as those of ``open_dataset``. Other datasets are split at random.

    Attributes:
        groups: the group of each sample; None if no column of groups was given.
    """

    groups: np.ndarray | None

    @property
    def divisible(self) -> int:
        """Return the number of samples to divide; for texts that are joined, the number of texts rather than pieces."""
        ...

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sample, int64 [samples], and what defines it, in words; None if there are no classes.

        Args:
            label: the input that the loss compares with.
        """
        ...

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Dataset:
        """Return some samples, in this order, as a dataset of the same kind.

        Args:
            indices: sample numbers, int64 [n].
            like: description of another part, whose computed values (such as statistics) replace those of these samples.
        """
        ...


class ArrayDataset:
    """Samples in arrays by input name, along the first axis of each.

    Args:
        arrays: input name -> array [samples, ...]; memory-mapped ones are read from their file (``FileRows``).
        classes: class names by index, if the labels were names.
        note: remark for the user.
        preprocessing: preprocessing of pixels, if any.
        table: columns of the arrays, if some are categorical.
        shared: names of arrays that all samples share.
        groups: group of each sample, [samples].

    Attributes:
        by: what defines the classes, in words.
        remade: makes the dataset of some samples, if ``part`` has to do more than index.
        labels: table columns of numeric or yes/no targets, or None.

    Raises:
        DataError: there are no arrays or samples, lengths differ, or an array lacks a sample axis or holds Python objects.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        classes: tuple[str, ...] | None = None,
        note: str | None = None,
        preprocessing: Preprocessing | None = None,
        table: TableDescription | None = None,
        shared: Collection[str] = (),
        groups: np.ndarray | None = None,
    ):
        self.arrays = {name: _of_text(np.asarray(array)) for name, array in arrays.items()}
        self.classes = classes
        self.note = note
        self.preprocessing = preprocessing
        self.table = table
        self.labels: LabelDescription | None = None
        self.shared = frozenset(shared)
        self.groups = groups
        self.by = "class"
        self.remade: Callable[[np.ndarray, DataDescription | None], ArrayDataset] | None = None
        if not self.arrays:
            raise DataError("the data set has no array; give one per input, such as {'x': x, 'labels': labels}")
        for name, array in self.arrays.items():
            if array.dtype == object:
                raise DataError(f"'{name}' holds Python objects; give an array of numbers, or of text")
            if array.ndim == 0 and name not in self.shared:
                raise DataError(f"'{name}' is a single number; give an array with one entry per sample")
        lengths = {name: len(array) for name, array in self.arrays.items() if name not in self.shared}
        if not lengths:
            raise DataError("no array of the data set has samples: each is the same for all of them")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise DataError(
                f"the arrays differ in their number of samples: {counts}; each sample needs one entry in every array, along its "
                "axis 0"
            )
        self._length = next(iter(lengths.values()))
        if groups is not None and len(groups) != self._length:
            raise DataError(f"the groups are those of {len(groups)} samples, and there are {self._length}; each needs one")
        if self._length == 0:
            raise DataError("the data set is empty: its arrays have 0 samples; give data with samples")
        mapped = {name: file_rows(array) for name, array in self.arrays.items() if name not in self.shared}
        self._files = {name: rows for name, rows in mapped.items() if rows is not None}

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices``, copied.

        Raises:
            DataError: the file of an array was truncated or cannot be read any more.
        """
        return {
            name: array if name in self.shared else self._files.get(name, array)[indices] for name, array in self.arrays.items()
        }

    @property
    def divisible(self) -> int:
        """Number of samples."""
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sample and what defines it, in words; None if the labels are not class indices."""
        labels = None if label is None else self.arrays.get(label.name)
        if labels is None or label is None or label.dtype.is_floating_point() or labels.dtype.kind not in "biu":
            return None
        return (labels.reshape(-1), self.by) if labels.size == len(self) and label.name not in self.shared else None

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Dataset:
        """Return some samples, copied; those of a memory-mapped file stay in the file."""
        if self.remade is not None:
            return self.remade(indices, like)
        if self._files:
            return Part(self, indices, like)
        arrays = {name: array if name in self.shared else array[indices] for name, array in self.arrays.items()}
        note = self.note if like is None else None
        part = ArrayDataset(arrays, self.classes, note, self.preprocessing, self.table, self.shared)
        part.labels = self.labels
        return part


def group_values(column: np.ndarray | None, name: str, source: str, available: str) -> np.ndarray:
    """Return the values of a column of groups, [samples].

    Args:
        column: the column; None if there is no such column.
        name: name of the column.
        source: name for errors.
        available: names of the columns there are.

    Raises:
        DataError: there is no such column, or it does not hold one value for each sample.
    """
    if column is None:
        raise DataError(f"{source}: no column '{name}' to take groups from (eval_split); there are {available}")
    column = _of_text(np.asarray(column))
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1 or column.dtype.kind not in "biufUS" or (column.dtype.kind == "f" and not np.isfinite(column).all()):
        raise DataError(
            f"{source}: the column '{name}' holds {column.dtype}{list(column.shape[1:]) or ''}, and a group (eval_split) is one "
            "number or text for each sample, none of them missing"
        )
    return column


def _of_text(array: np.ndarray) -> np.ndarray:
    """Return an object array of strings (as in pandas) as an array of text; other arrays are unchanged."""
    is_text = array.dtype == object and all(isinstance(item, str) for item in array.reshape(-1).tolist())
    return array.astype(str) if is_text else array
