"""Parts of datasets that cannot be divided themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from burnish.data.model_metadata import DataDescription


class Part:
    """Some samples of a dataset, read from it on demand.

    Args:
        dataset: the whole dataset.
        indices: sample numbers, int64 [n].
        like: see ``DividedDataset.part``.

    Attributes:
        classes, preprocessing, table, described: those of the whole, if it has them.
        note: the whole's note; only on its first part.
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
        """The whole's remark; only on its first part."""
        remark: str | None = getattr(self._whole, "remark", None) if self._is_first else None
        return remark

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = self._whole.batch(self._indices[indices])
        return batch


class AugmentedPart(Part):
    """A part of an ``AugmentedDataset``."""

    def augmented(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = self._whole.augmented(self._indices[indices], seed, epoch)
        return batch


class EpochPart(Part):
    """A part of an ``EpochDataset``, visited in the whole's order."""

    def order(self, batch_size: int, seed: int, epoch: int) -> np.ndarray:
        """Return the whole's order of an epoch, restricted to this part, int64 [samples]."""
        places = np.full(len(self._whole), -1, np.int64)
        places[self._indices] = np.arange(len(self))
        order = places[self._whole.order(batch_size, seed, epoch)]
        return order[order >= 0]

    def batch_of_epoch(self, indices: np.ndarray, seed: int, epoch: int) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = self._whole.batch_of_epoch(self._indices[indices], seed, epoch)
        return batch
