"""A part of any data set, whose samples are read from the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from burnish.data.model_metadata import DataDescription


class Part:
    """Some samples of a data set, which are read from it when they are asked for.

    Args:
        dataset: the whole.
        indices: the numbers of the samples, int64 [n].
        like: as ``DividedDataset.part`` takes it.

    Attributes:
        classes, preprocessing, table, described: those of the whole, where it has them.
        note: that of the whole, which the first of its parts says.
    """

    def __init__(self, dataset: Any, indices: np.ndarray, like: DataDescription | None = None):
        self._whole, self._indices = dataset, np.asarray(indices, np.int64)
        for name in ("classes", "preprocessing", "table", "described"):
            setattr(self, name, getattr(dataset, name, None))
        self.note = None if like is not None else getattr(dataset, "note", None)
        self._is_first = like is None

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def remark(self) -> str | None:
        """What became known of the whole as it was read, which the first of its parts says."""
        remark: str | None = getattr(self._whole, "remark", None) if self._is_first else None
        return remark

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices`` of this part."""
        batch: dict[str, np.ndarray] = self._whole.batch(self._indices[indices])
        return batch


class AugmentedPart(Part):
    """A part of an ``AugmentedDataset``."""

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return samples as an epoch has them: as the whole changes them."""
        batch: dict[str, np.ndarray] = self._whole.augmented(self._indices[indices], seed, epoch)
        return batch


class EpochPart(Part):
    """A part of an ``EpochDataset``, in whose order its samples are visited."""

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch, int64 [samples]: that of the whole, without the samples of other parts."""
        places = np.full(len(self._whole), -1, np.int64)
        places[self._indices] = np.arange(len(self))
        order = places[self._whole.order(batch_size, seed, epoch)]
        return order[order >= 0]

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        """Return samples as an epoch has them."""
        batch: dict[str, np.ndarray] = self._whole.batch_of_epoch(self._indices[indices], seed, epoch)
        return batch
