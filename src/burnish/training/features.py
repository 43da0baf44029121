"""The features of a frozen backbone, computed of a batch."""

from __future__ import annotations

import math
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data import Dataset, DataSpec, EpochDataset, Loader
from burnish.data.file_rows import FileRows
from burnish.engines import Engine, ProgramRunner
from burnish.engines.array_runner import InheritedRunner
from burnish.errors import ConfigurationError, DataError
from burnish.program import Program, Role
from burnish.program.layout import stand_in
from burnish.program.signature import FEATURES
from burnish.training.inputs import BatchCheck


class Features:
    """The features that the frozen part of a program's model computes of a batch (``burnish.compile(cached_features=...)``).

    Args:
        program: the program.
        engine, device, threads: as a session has them.
        look: called with the first batch, which has the inputs of the model; the batches of steps have features.
        part: whether batches are a worker's parts, which may be without samples.

    Attributes:
        program: the program.
        names: of the features, which the steps of the program take; empty where it has none.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        device: str | None = None,
        threads: int | None = None,
        look: Callable[[Mapping[str, Any]], None] | None = None,
        part: bool = False,
    ):
        self.program, self._engine, self._device, self._threads = program, engine, device, threads
        self._runner: ProgramRunner | None = None
        self._lock = threading.Lock()
        self._look = look
        signature = program.signature
        self.names = tuple(entry.name for entry in signature[FEATURES].outputs) if FEATURES in signature.graphs else ()
        if self.names:
            taken = {entry.name for entry in signature["step"].inputs_of(Role.DATA, Role.LABEL)}
            computed_from = {entry.name for entry in signature[FEATURES].inputs_of(Role.DATA)}
            ignored = (taken | {entry.name for entry in signature.samples}) - computed_from
            self._check = BatchCheck(signature[FEATURES], ignored, part)
            self._taken = taken.difference(self.names)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the features of a batch by name, [samples, ...].

        Args:
            batch: the model's inputs by name; labels in it are not used.

        Raises:
            ConfigurationError: the program has no cached features.
            InputError: the batch does not fit the model.
            EngineError: the engine fails.
        """
        if not self.names:
            raise ConfigurationError(
                "The program has no features that are computed once: compile it with cached_features='auto', or with the name of "
                "the value that they are"
            )
        inputs = self._check(batch)
        without_samples = {name: self._stand_in(name, array) for name, array in inputs.items() if not array.size}
        if not without_samples and self._look is not None:
            look, self._look = self._look, None
            look(batch)
        with self._lock:
            if self._runner is None:
                from burnish.compiler.lowered_graphs import LoweredGraphs

                graphs = LoweredGraphs.of_model(self.program.graphs.unlowered(FEATURES), self._engine.target)
                self._runner = self._engine.open(graphs, {}, device=self._device, threads=self._threads)
            computed = dict(self._runner.step({**inputs, **without_samples}))
        return {name: self._none_of(name, array) for name, array in computed.items()} if without_samples else computed

    def _stand_in(self, name: str, array: np.ndarray) -> np.ndarray:
        """What the graph runs on in place of an input without samples."""
        signature = self.program.signature[FEATURES]
        entry = next(entry for entry in signature.inputs_of(Role.DATA) if entry.name == name)
        return stand_in(entry, array.shape, signature)

    def _none_of(self, name: str, array: np.ndarray) -> np.ndarray:
        """A feature of no samples, of the shape that it has of some."""
        entry = next(entry for entry in self.program.signature[FEATURES].outputs if entry.name == name)
        return array if entry.sample_axis is None else np.delete(array, np.s_[:], entry.sample_axis)

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch as ``step`` and ``evaluate`` take it: features in place of the inputs that they are computed from.

        Raises:
            ConfigurationError, InputError, EngineError: as when the features are computed.
        """
        return {**self(batch), **{name: batch[name] for name in self._taken if name in batch}}

    def inherit(self) -> None:
        """Go on in a process that was forked, where the engine is opened anew."""
        self._lock = threading.Lock()
        if self._runner is not None:
            InheritedRunner(self._runner)
            self._runner = None

    def close(self) -> None:
        """Free what the engine holds; it is opened again where features are asked for."""
        with self._lock:
            self._runner = None


IN_MEMORY = 256 << 20
"""Bytes of features up to which they are kept in memory, and above which in a file."""
SPARED = 64 << 20
"""Bytes of a disk that are left free beside the file of the features."""


class FeatureDataset:
    """A data set as the steps of a program with cached features take it: those of each sample are computed once (``fill``).

    They are computed in the order of the data and in batches of one size, whatever the order of the epochs: a run that goes on
    computes them with the same bits.

    Args:
        source: the samples, as the model takes them.
        name: of the file, where the features do not fit into memory.

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
        """What became known of the samples as they were read."""
        remark: str | None = getattr(self.source, "remark", None)
        return remark

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_filled(self) -> bool:
        """Return whether the features are there."""
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
        """Compute the features of all samples, and return a line that says so.

        Args:
            features: of a session.
            batch_size: samples of a batch.
            processes: that read samples ahead.
            folder: of the file, which is made where the features are larger than 256 MiB, and removed when they are not used.

        Raises:
            DataError: samples whose features differ in shape, or their file cannot be written.
            ConfigurationError: there is no room on the disk.
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
        """Return arrays for all samples, in memory, or those of numbers in a file, whose path is returned then."""
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
