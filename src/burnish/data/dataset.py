"""The protocol of data sets, and the one that holds arrays."""

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
    """Samples that can be read in any order. Any class with these two methods will do."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices`` (int64, [n]) as arrays by input name, the sample axis first."""
        ...


@runtime_checkable
class EpochDataset(Dataset, Protocol):
    """A data set that chooses the order in which it is visited, and whose samples may differ from epoch to epoch.

    Both are functions of their arguments alone, so that a run goes on anywhere, and every worker sees the same.
    """

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch in a shuffled order of their visit, int64 [samples]."""
        ...

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return a whole batch as an epoch has it; ``batch`` returns that of seed 0 and epoch 0."""
        ...


@runtime_checkable
class AugmentedDataset(Dataset, Protocol):
    """A data set whose samples are changed at random in training, each by itself.

    ``batch`` returns samples as they are, for evaluation.
    """

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return the samples at ``indices`` as an epoch has them; each is a function of seed, epoch and its index alone."""
        ...


@runtime_checkable
class DividedDataset(Dataset, Protocol):
    """A data set that a part can be held out of by class or by groups. The data sets of ``open_dataset`` are such.

    A data set of your own may be one too; of any other a part is held out at random.

    Attributes:
        groups: the group of each sample, by which the data were opened; None where they were opened without.
    """

    groups: np.ndarray | None

    @property
    def divisible(self) -> int:
        """How many samples there are to divide: of texts that are joined, the texts, and not the pieces."""
        ...

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sample, int64 [samples], and what says so, in words; None where samples have no class.

        Args:
            label: the input that the loss compares with.
        """
        ...

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Dataset:
        """Return some samples, in this order, as a data set of the same kind.

        Args:
            indices: their numbers, int64 [n].
            like: what another part says of itself: what is computed of the data is taken from it, and not of these samples.
        """
        ...


class ArrayDataset:
    """Samples held in arrays, by input name; the first axis of each is the sample.

    Args:
        arrays: input name -> array [samples, ...]. Of one in a mapped file, batches are read from the file (``FileRows``).
        classes: names of the classes, where the labels came from names; class index ``i`` is ``classes[i]``.
        note: what a person should know about how the data were read.
        preprocessing: what was done to the arrays that are pixels; None where none are.
        table: the columns that the arrays were made of, where some hold categories.
        shared: the names of arrays that are the same for all samples: each batch has them whole.
        groups: the group of each sample, [samples]; None where there are none.

    Attributes:
        by: what says the classes of the samples, in words.
        remade: makes the data set of some samples, as ``part`` does, where more is to be done than to take them from the arrays.

    Attributes:
        labels: the columns that targets were read from, where they are values, or yes and no, of a table; else None.

    Raises:
        DataError: no array, an array without a sample axis, no sample, numbers of samples that differ, Python objects.
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
            DataError: a file that an array lies in has become shorter, or cannot be read any more.
        """
        return {
            name: array if name in self.shared else self._files.get(name, array)[indices] for name, array in self.arrays.items()
        }

    @property
    def divisible(self) -> int:
        """How many samples there are."""
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sample, and what says so, in words; None where the labels are no class indices."""
        labels = None if label is None else self.arrays.get(label.name)
        if labels is None or label is None or label.dtype.is_floating_point() or labels.dtype.kind not in "biu":
            return None
        return (labels.reshape(-1), self.by) if labels.size == len(self) and label.name not in self.shared else None

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Dataset:
        """Return some samples, copied; those of a mapped file are read from it when they are asked for."""
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
    """Return the values of a column that say which samples belong together, [samples].

    Args:
        column: the column; None where there is none of this name.
        name: of the column.
        source: what to call the data in an error.
        available: the columns that there are, in words.

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
    """Return objects that are all texts, as pandas has them, as an array of text; any other array as it is."""
    is_text = array.dtype == object and all(isinstance(item, str) for item in array.reshape(-1).tolist())
    return array.astype(str) if is_text else array
