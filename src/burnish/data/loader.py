"""The order in which samples are visited: a pure function of the seed and the epoch, so that a run can go on anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from burnish.data.dataset import Dataset, EpochDataset
from burnish.errors import ConfigurationError

Augmentation = Callable[[dict[str, np.ndarray], np.random.Generator], dict[str, np.ndarray]]

# Keeps the streams of random numbers for the order and for augmentation apart.
ORDER, AUGMENTATION = 0, 1


class Loader:
    """Cuts a data set into batches.

    Args:
        dataset: the samples. An ``EpochDataset`` says itself in which order it is shuffled.
        batch_size: samples in a batch; the last batch of an epoch may be shorter.
        seed: seed of the order and of the augmentation.
        shuffle: visit the samples in a new order each epoch, else in their own.
        drop_last: leave out a last batch that is shorter than ``batch_size``.
        augment: ``(batch, generator) -> batch``, random changes to a batch. Its generator is seeded by the seed, the epoch
            and the number of the batch alone.
        rank, workers: yield the part of each batch that a worker of this rank has among so many: the parts of all of them, one
            after the other, are the batch that one process has. Their sizes differ by one at most; a part may be empty. What
            ``augment`` changes may depend on the whole batch, so that with it each worker reads the whole batch.

    Raises:
        ConfigurationError: a batch size below 1, or no batch at all because ``drop_last`` drops the only one; or a rank that is
            none of the workers'.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        augment: Augmentation | None = None,
        rank: int = 0,
        workers: int = 1,
    ):
        if not 0 <= rank < workers:
            raise ConfigurationError(f"rank={rank}, workers={workers}: ranks count from 0 to one below the number of workers")
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
        self.rank = rank
        self.workers = workers
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
        if isinstance(self.dataset, EpochDataset):
            return self.dataset.order(self.batch_size, self.seed, epoch)
        return np.random.default_rng((self.seed, ORDER, epoch)).permutation(len(self.dataset)).astype(np.int64)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Yield the batches of an epoch, or this worker's parts of them, from batch number ``start`` on."""
        order = self.order(epoch)
        for number in range(start, len(self)):
            indices = order[number * self.batch_size : (number + 1) * self.batch_size]
            part = part_of(len(indices), self.rank, self.workers)
            if self.augment is not None or isinstance(self.dataset, EpochDataset):
                batch = self._whole(indices, epoch, number)
                yield batch if self.workers == 1 else {name: array[part] for name, array in batch.items()}
            elif part.start == part.stop:
                # A data set need not be able to read nothing; one sample tells the shapes.
                yield {name: array[:0] for name, array in self.dataset.batch(indices[:1]).items()}
            else:
                yield self.dataset.batch(indices[part])

    def _whole(self, indices: np.ndarray, epoch: int, number: int) -> dict[str, np.ndarray]:
        """Return a batch of which what a sample becomes may depend on the others, as padding does, or on the epoch."""
        own = self.dataset if isinstance(self.dataset, EpochDataset) else None
        batch = self.dataset.batch(indices) if own is None else own.batch_of_epoch(indices, self.seed, epoch)
        if self.augment is None:
            return batch
        return self.augment(batch, np.random.default_rng((self.seed, AUGMENTATION, epoch, number)))


def part_of(samples: int, rank: int, workers: int) -> slice:
    """Return which of so many samples a worker has: parts follow each other by rank, and the first may have one more."""
    each, rest = divmod(samples, workers)
    start = rank * each + min(rank, rest)
    return slice(start, start + each + (1 if rank < rest else 0))
