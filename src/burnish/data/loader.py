"""The loader: batches of a data set in an order that the seed and the epoch alone decide, so that a run can go on anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset, Dataset, EpochDataset
from burnish.data.read_ahead import ReadAhead
from burnish.data.reading_process import Request
from burnish.errors import ConfigurationError
from burnish.validation import is_whole

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
        processes: how many processes read batches ahead of the step that takes them; 0 reads in this one. The batches are the
            same. Arrays in memory are not read so. ``close`` ends the processes.
        spec: what the program takes (``DataSpec.by(program)``): batches then come in the layout of its model, whose samples may
            stand along another axis than the first. None: as the data set has them, samples first.

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
        processes: int = 0,
        spec: DataSpec | None = None,
    ):
        if not is_whole(processes) or processes < 0:
            raise ConfigurationError(f"processes={processes!r}: give a whole number of reading processes, 0 or more")
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
        self.spec = spec
        if len(self) == 0:
            raise ConfigurationError(
                f"batch_size={batch_size} leaves no batch: the data set has {len(dataset)} samples; "
                "give a smaller batch_size or keep the last batch (drop_last=False)"
            )
        is_read = processes > 0 and not isinstance(dataset, ArrayDataset)
        self._reader = ReadAhead(dataset, processes) if is_read else None

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
        """Yield the batches of an epoch, or this worker's parts of them, from batch number ``start`` on, as the model takes them.

        Raises:
            DataError: what the data set raises; or a reading process has ended.
        """
        order, numbers = self.order(epoch), range(start, len(self))
        reads_whole = self.augment is not None or isinstance(self.dataset, EpochDataset)
        parts = [slice(None) if reads_whole else self._part(number) for number in numbers]
        requests = (
            # A data set need not be able to read nothing; one sample tells the shapes.
            Request(self._indices(order, number)[part if part.start != part.stop or reads_whole else slice(1)], self.seed, epoch)
            for number, part in zip(numbers, parts, strict=True)
        )
        batches = self._reader.batches(requests) if self._reader is not None else (each.read(self.dataset) for each in requests)
        for number, part, batch in zip(numbers, parts, batches, strict=True):
            if self.augment is not None:
                batch = self.augment(batch, np.random.default_rng((self.seed, AUGMENTATION, epoch, number)))
            if reads_whole and self.workers > 1:
                batch = self._of_samples(batch, self._part(number))
            elif part.start is not None and part.start == part.stop:
                batch = self._of_samples(batch, slice(0, 0))
            yield batch if self.spec is None else self.spec.to_model(batch)

    def every(self, first: int, step: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield every ``step``-th whole batch of the first epoch, from number ``first`` on, without reading the others."""
        order = self.order(0)
        for number in range(first, len(self), step):
            batch = self.dataset.batch(self._indices(order, number))
            yield batch if self.spec is None else self.spec.to_model(batch)

    def samples_in(self, number: int) -> int:
        """Return how many samples a batch of all workers has, by its number."""
        return min(self.batch_size, len(self.dataset) - number * self.batch_size)

    def close(self) -> None:
        """End the reading processes; batches are read in this one from here on."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _of_samples(self, batch: dict[str, np.ndarray], part: slice) -> dict[str, np.ndarray]:
        """These samples of a batch; what all samples have in common stays whole."""
        shared = frozenset() if self.spec is None else self.spec.shared(batch)
        return {name: array if name in shared else array[part] for name, array in batch.items()}

    def _indices(self, order: np.ndarray, number: int) -> np.ndarray:
        return order[number * self.batch_size : (number + 1) * self.batch_size]

    def _part(self, number: int) -> slice:
        return part_of(self.samples_in(number), self.rank, self.workers)


def part_of(samples: int, rank: int, workers: int) -> slice:
    """Return which of so many samples a worker has: parts follow each other by rank, and the first may have one more."""
    each, rest = divmod(samples, workers)
    start = rank * each + min(rank, rest)
    return slice(start, start + each + (1 if rank < rest else 0))


def shift_images(name: str, pixels: int = 1) -> Augmentation:
    """Return an augmentation that moves every image by up to ``pixels`` in height and in width; zeros move in.

    Args:
        name: the input that holds the images, [batch, channels, height, width].
        pixels: the largest shift; each of the 2 * pixels + 1 shifts along an axis is equally likely.
    """

    def augment(batch: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        images = batch[name]
        count, _, height, width = images.shape
        padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        down, right = generator.integers(0, 2 * pixels + 1, (2, count))
        return {**batch, name: np.ascontiguousarray(windows[np.arange(count), :, down, right])}

    return augment
