"""Batches of a dataset, in an order that depends only on seed and epoch, so that a run can resume anywhere."""

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

# Keys of the random streams for order and augmentation.
ORDER, AUGMENTATION = 0, 1


class Loader:
    """Batches of a dataset.

    Args:
        dataset: the samples; an ``EpochDataset`` shuffles itself.
        batch_size: samples per batch; the last may be smaller.
        seed: seed of order and augmentation.
        shuffle: True for a new order in each epoch.
        drop_last: True to leave out a smaller last batch.
        augment: ``(batch, generator) -> batch``, random changes; the generator depends only on the seed, the epoch and the batch
            number.
        rank, workers: this worker's rank, and their number. Each worker gets its part of every batch, in order of rank; sizes
            differ by at most one, and may be 0. With ``augment``, every worker reads whole batches, as changes may depend on
            them.
        processes: processes that read batches ahead; 0 reads in this one. Arrays in memory never use them, and batches do not
            depend on them. ``close`` ends them.
        spec: inputs of the program (``DataSpec.by(program)``), to yield the model's layout; None keeps samples first.

    Raises:
        ConfigurationError: an argument is out of range, or no batch is left.
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
        """Return the number of batches in an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample indices of an epoch in order (int64, [samples])."""
        if not self.shuffle:
            return np.arange(len(self.dataset), dtype=np.int64)
        if isinstance(self.dataset, EpochDataset):
            return self.dataset.order(self.batch_size, self.seed, epoch)
        return np.random.default_rng((self.seed, ORDER, epoch)).permutation(len(self.dataset)).astype(np.int64)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Yield this worker's parts of the batches of an epoch, from batch ``start`` on, in the model's layout.

        Raises:
            DataError: the dataset cannot be read, or a reading process has ended.
        """
        order, numbers = self.order(epoch), range(start, len(self))
        reads_whole = self.augment is not None or isinstance(self.dataset, EpochDataset)
        parts = [slice(None) if reads_whole else self._part(number) for number in numbers]
        requests = (
            # Read one sample for an empty part: datasets need not support empty batches, but its shapes are needed.
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
        """Return the number of samples in a batch over all workers."""
        return min(self.batch_size, len(self.dataset) - number * self.batch_size)

    def close(self) -> None:
        """End the reading processes; later batches are read in this process."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _of_samples(self, batch: dict[str, np.ndarray], part: slice) -> dict[str, np.ndarray]:
        """Return a part of a batch; shared arrays stay whole."""
        shared = frozenset() if self.spec is None else self.spec.shared(batch)
        return {name: array if name in shared else array[part] for name, array in batch.items()}

    def _indices(self, order: np.ndarray, number: int) -> np.ndarray:
        return order[number * self.batch_size : (number + 1) * self.batch_size]

    def _part(self, number: int) -> slice:
        return part_of(self.samples_in(number), self.rank, self.workers)


def part_of(samples: int, rank: int, workers: int) -> slice:
    """Return a worker's slice of the samples. Slices follow in order of rank; the first ones may have one sample more."""
    each, rest = divmod(samples, workers)
    start = rank * each + min(rank, rest)
    return slice(start, start + each + (1 if rank < rest else 0))


def shift_images(name: str, pixels: int = 1) -> Augmentation:
    """Return an augmentation that shifts every image by up to ``pixels`` in height and width, with zero padding.

    Args:
        name: the image input, [batch, channels, height, width].
        pixels: largest shift; all 2 * pixels + 1 shifts along an axis are equally likely.
    """

    def augment(batch: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        images = batch[name]
        count, _, height, width = images.shape
        padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        down, right = generator.integers(0, 2 * pixels + 1, (2, count))
        return {**batch, name: np.ascontiguousarray(windows[np.arange(count), :, down, right])}

    return augment
