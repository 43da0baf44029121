"""The order in which samples are visited: a pure function of the seed and the epoch, so that a run can go on anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from burnish.data.dataset import Dataset
from burnish.errors import ConfigurationError

Augmentation = Callable[[dict[str, np.ndarray], np.random.Generator], dict[str, np.ndarray]]

# Keeps the streams of random numbers for the order and for augmentation apart.
ORDER, AUGMENTATION = 0, 1


class Loader:
    """Cuts a data set into batches.

    Args:
        dataset: the samples.
        batch_size: samples in a batch; the last batch of an epoch may be shorter.
        seed: seed of the order and of the augmentation.
        shuffle: visit the samples in a new order each epoch, else in their own.
        drop_last: leave out a last batch that is shorter than ``batch_size``.
        augment: ``(batch, generator) -> batch``, random changes to a batch. Its generator is seeded by the seed, the epoch
            and the number of the batch alone.

    Raises:
        ConfigurationError: a batch size below 1, or no batch at all because ``drop_last`` drops the only one.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augmentation | None = None,
    ):
        if batch_size < 1:
            raise ConfigurationError(f"batch_size={batch_size}: a batch holds 1 sample or more")
        if seed < 0:
            raise ConfigurationError(f"seed={seed}: give a seed of 0 or more")
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.augment = augment
        if len(self) == 0:
            raise ConfigurationError(
                f"batch_size={batch_size} leaves no batch: the data set has {len(dataset)} samples; "
                "give a smaller batch_size or keep the last batch (drop_last=False)"
            )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch in the order of their visit (int64, [samples])."""
        if not self.shuffle:
            return np.arange(len(self.dataset), dtype=np.int64)
        return np.random.default_rng((self.seed, ORDER, epoch)).permutation(len(self.dataset)).astype(np.int64)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches of an epoch, from batch number ``start`` on."""
        order = self.order(epoch)
        for number in range(start, len(self)):
            batch = self.dataset.batch(order[number * self.batch_size : (number + 1) * self.batch_size])
            if self.augment is not None:
                batch = self.augment(batch, np.random.default_rng((self.seed, AUGMENTATION, epoch, number)))
            yield batch
