"""A data set of the features of a frozen backbone, computed once per sample."""

from __future__ import annotations

import math
import shutil
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from burnish.data import Dataset, DataSpec, EpochDataset, Loader
from burnish.data.file_rows import FileRows
from burnish.errors import ConfigurationError, DataError
from burnish.training.features import Features

IN_MEMORY = 256 << 20
"""Most bytes of features kept in memory; larger ones go to a file."""
SPARED = 64 << 20
"""Bytes of a disk to leave free."""


class FeatureDataset:
    """A data set for the steps of a program with cached features: ``fill`` computes those of each sample once.

    They are computed in the order of the data and in batches of one size, whatever the order of the epochs, so a resumed run
    computes the same bits.

    Args:
        source: the samples, as the model reads them.
        name: name of the file for features that do not fit into memory.

    Attributes:
        note, remark: those of the samples.

    Raises:
        DataError: a sample may differ from epoch to epoch.
    """

    def __init__(self, source: Dataset, name: str):
        task = getattr(getattr(source, "text", None), "task", None)
        if isinstance(source, EpochDataset) and task != "label":
            raise DataError(
                "cached features: the data are other ones in each epoch"
                + (f" (the task '{task}' draws what is masked)" if task == "masked" else "")
                + ", and features are computed once: compile without cached_features"
            )
        self.source, self._name = source, name
        self._arrays: dict[str, np.ndarray | FileRows] | None = None
        self._shared: dict[str, np.ndarray] = {}
        self.note = getattr(source, "note", None)

    @property
    def remark(self) -> str | None:
        """A remark on the samples that reading them revealed."""
        remark: str | None = getattr(self.source, "remark", None)
        return remark

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_filled(self) -> bool:
        """True if the features are computed."""
        return self._arrays is not None

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices``, copied.

        Raises:
            DataError: the features have not been computed; or their file has become shorter, or cannot be read any more.
        """
        if self._arrays is None:
            raise DataError("The features of the data have not been computed: call fill, or Trainer.run, which does")
        return {**{name: np.asarray(array[indices]) for name, array in self._arrays.items()}, **self._shared}

    def fill(self, features: Features, batch_size: int, folder: Path, processes: int = 0) -> str:
        """Compute the features of all samples, and return a line that reports it.

        Args:
            features: features of a session.
            batch_size: samples per batch.
            processes: number of processes that read samples ahead.
            folder: folder of the file for features larger than 256 MiB; the file is removed when no longer used.

        Raises:
            DataError: the features of samples differ in shape, or their file cannot be written.
            ConfigurationError: the disk is full.
        """
        begin, where = time.monotonic(), "in memory"
        arrays: dict[str, np.ndarray | FileRows] = {}
        samples, taken_by = len(self), DataSpec.of_steps(features.program)
        loader = Loader(self.source, batch_size, shuffle=False, processes=processes, spec=DataSpec.by(features.program))
        for start, read in zip(range(0, samples, batch_size), loader.epoch(0), strict=True):
            indices = np.arange(start, min(start + batch_size, samples))
            computed = features.batch(read)
            batch = taken_by.to_data_set({name: np.asarray(array) for name, array in computed.items()})
            if not arrays:
                shared = taken_by.shared(batch)
                self._shared = {name: array for name, array in batch.items() if name in shared}
                arrays, path = self._allocated({name: batch[name] for name in batch if name not in shared}, folder)
                where = "in memory" if path is None else f"in '{path}'"
            for name in arrays:
                array, kept = batch[name], arrays[name]
                if array.shape[1:] != kept.shape[1:]:
                    raise DataError(
                        f"cached features: '{name}' has shape {list(kept.shape[1:])} for one sample and "
                        f"{list(array.shape[1:])} for sample {start}, so that they cannot be kept: bring samples to one length, "
                        "or compile without cached_features"
                    )
                if isinstance(kept, FileRows):
                    kept.write(start, array.astype(kept.dtype, copy=False))
                    continue
                if array.dtype.kind in "US" and array.dtype.itemsize > kept.dtype.itemsize:
                    kept = arrays[name] = kept.astype(array.dtype)
                kept[indices] = array
        loader.close()
        self._arrays = arrays
        taken = sum(kept.dtype.itemsize * math.prod(kept.shape) for kept in arrays.values())
        return (
            f"features: computed once for {samples:,} samples in {time.monotonic() - begin:.1f} s, {taken / 1e6:,.1f} MB "
            f"{where}; epochs train from there"
        )

    def _allocated(self, batch: Mapping[str, np.ndarray], folder: Path) -> tuple[dict[str, np.ndarray | FileRows], Path | None]:
        """Return arrays for all samples; large numeric ones are in a file, whose path is returned too."""
        samples = len(self)
        shapes = {name: (samples, *array.shape[1:]) for name, array in batch.items()}
        sizes = {name: samples * (array.nbytes // max(len(array), 1)) for name, array in batch.items()}
        if sum(sizes.values()) <= IN_MEMORY:
            return {name: np.empty(shapes[name], array.dtype) for name, array in batch.items()}, None
        folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(folder).free, sum(sizes.values())
        if needed > free - SPARED:
            raise ConfigurationError(
                f"cached features: those of {samples:,} samples take {needed / 1e9:,.2f} GB, and the disk of '{folder}' has "
                f"{free / 1e9:,.2f} GB free: make room, put the run elsewhere, name a value with fewer elements (one behind a "
                "pooling layer), or compile without cached_features"
            )
        path = folder / f"{self._name}.features"
        path.write_bytes(b"")
        weakref.finalize(self, _remove, path)
        arrays: dict[str, np.ndarray | FileRows] = {}
        place = 0
        for name, array in batch.items():
            if array.dtype.kind in "OSU":
                arrays[name] = np.empty(shapes[name], array.dtype)
                continue
            arrays[name] = FileRows(path, array.dtype, shapes[name], place, writable=True)
            place += sizes[name]
        return arrays, path


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
