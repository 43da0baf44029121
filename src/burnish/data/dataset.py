"""The protocol of data sets, and the one that holds arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from burnish.data.file_rows import file_rows
from burnish.data.preprocessing import Preprocessing
from burnish.data.table_coding import TableDescription
from burnish.errors import DataError


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


class ArrayDataset:
    """Samples held in arrays, by input name; the first axis of each is the sample.

    Args:
        arrays: input name -> array [samples, ...]. Of one in a mapped file, batches are read from the file (``FileRows``).
        classes: names of the classes, where the labels came from names; class index ``i`` is ``classes[i]``.
        note: what a person should know about how the data were read.
        preprocessing: what was done to the arrays that are pixels; None where none are.
        table: the columns that the arrays were made of, where some hold categories.
        shared: the names of arrays that are the same for all samples: each batch has them whole.

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
    ):
        self.arrays = {name: _of_text(np.asarray(array)) for name, array in arrays.items()}
        self.classes = classes
        self.note = note
        self.preprocessing = preprocessing
        self.table = table
        self.shared = frozenset(shared)
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
        if self._length == 0:
            raise DataError("the data set is empty: its arrays have 0 samples")
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


def _of_text(array: np.ndarray) -> np.ndarray:
    """Return objects that are all texts, as pandas has them, as an array of text; any other array as it is."""
    is_text = array.dtype == object and all(isinstance(item, str) for item in array.reshape(-1).tolist())
    return array.astype(str) if is_text else array
