"""Folders of ``.npy`` files, read batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.data_spec import DataSpec, fit_data, fit_label, turned_inputs
from burnish.data.file_rows import FileRows, file_rows
from burnish.data.npz import DAMAGE
from burnish.data.pixel_presets import PixelsLike
from burnish.data.preprocessing import takes_bytes
from burnish.errors import DataError

SUFFIX = ".npy"


class MappedArrays:
    """A folder with an array for each input, ``<input>.npy``; a single input may be ``x.npy``, and the labels ``y.npy``. That
    of an input without samples is taken whole.

    Arrays of inputs are read and fitted to the model batch by batch (``FileRows``); labels are read whole. Nothing is unpickled.

    Args:
        path: the folder.
        spec: what the program takes.
        classes: names of the classes in the order of their indices.
        pixels: what is done to arrays of bytes, as ``open_dataset`` takes it.

    Attributes:
        classes: names of the classes, where the labels are names.
        preprocessing: what is done to arrays of bytes; None where there are none.
        note: what a person should know of the arrays.

    Raises:
        DataError: an array is missing, damaged, of Python objects or of another length than the others, or does not fit.
    """

    def __init__(self, path: Path, spec: DataSpec, classes: Sequence[str] | None = None, pixels: PixelsLike | None = None):
        self._source = str(path)
        self._entries = spec.data
        self._paths = {entry.name: _file(path, entry.name, "x", len(spec.data) == 1) for entry in spec.data}
        self._arrays = {name: _rows(file) for name, file in self._paths.items()}
        forms = {name: np.broadcast_to(np.empty((), rows.dtype), rows.shape) for name, rows in self._arrays.items()}
        bytes_of = [entry for entry in spec.data if takes_bytes(forms[entry.name], entry)]
        self.preprocessing = spec.preprocessing_for(bytes_of[0], pixels) if bytes_of else None
        if pixels is not None and not bytes_of:
            raise DataError(f"{path}: its numbers are taken as they are; pixels says what is done to bytes (uint8): leave it out")
        self._labels: dict[str, np.ndarray] = {}
        self.classes: tuple[str, ...] | None = None
        for label in (spec.label, *spec.further_labels):
            if label is not None:
                read = np.array(_open(_file(path, label.name, "y", not spec.further_labels)))
                self._labels[label.name], names = fit_label(read, label, self._source, classes, spec)
                self.classes = self.classes or names
        self._shared = spec.shared(forms)
        held = {**self._arrays, **self._labels}
        lengths = {name: len(array) for name, array in held.items() if name not in self._shared}
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            counts = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise DataError(f"{path}: its arrays hold {counts} samples; each sample needs one entry in every array")
        self._length = next(iter(lengths.values()))
        turned = turned_inputs(forms, spec.data)
        self.note = None if turned is None else f"{path}: {turned}"
        self.batch(np.arange(1))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices``.

        Raises:
            DataError: a value that is not finite, or that the model's input cannot hold, by its sample; or a file has become
                shorter, or cannot be read any more.
        """
        indices = np.asarray(indices, np.int64)
        batch = {}
        for entry in self._entries:
            rows = self._arrays[entry.name]
            array = rows[np.arange(len(rows)) if entry.name in self._shared else indices]
            samples = None if entry.name in self._shared else indices
            batch[entry.name] = fit_data(array, entry, str(self._paths[entry.name]), self.preprocessing, samples)
        return {**batch, **{name: labels[indices] for name, labels in self._labels.items()}}


def _file(path: Path, name: str, short: str, alone: bool) -> Path:
    names = [name, short] if alone else [name]
    file = next((path / f"{each}{SUFFIX}" for each in names if (path / f"{each}{SUFFIX}").is_file()), None)
    if file is None:
        there = ", ".join(sorted(each.name for each in path.glob(f"*{SUFFIX}"))) or "none"
        raise DataError(f"{path}: no array {' or '.join(f'{each}{SUFFIX}' for each in names)}; the folder has {there}")
    return file


def _rows(path: Path) -> FileRows | np.ndarray:
    """An array in a file as rows that are read when they are wanted; one in Fortran order whole."""
    mapped = _open(path)
    return file_rows(mapped) or np.array(mapped)


def _open(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGE as error:
        raise DataError(f"{path}: damaged, no .npy file, or one of Python objects ({error})") from error
    if not isinstance(array, np.ndarray) or array.ndim == 0 or math.prod(array.shape) == 0:
        raise DataError(f"{path}: no samples; the first axis of an array counts them")
    return array
