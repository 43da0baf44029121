"""NumPy archives: one array per input by name, or ``x`` and ``y``."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.dataset import ArrayDataset
from burnish.data.wanted import Wanted, fit_data, fit_label
from burnish.errors import DataError


def open_npz(path: Path, wanted: Wanted, classes: Sequence[str] | None = None) -> ArrayDataset:
    """Read an ``.npz`` file. Nothing in it is unpickled.

    The archive holds one array per input under the input's own name; a single data input may be called ``x`` and the
    label ``y``.

    Raises:
        DataError: not an archive of arrays, a missing array, Python objects, or samples that do not fit the model.
    """
    arrays = read_npz(path)
    available = ", ".join(f"'{name}' {list(array.shape)}" for name, array in arrays.items()) or "none"
    chosen: dict[str, np.ndarray] = {}
    for entry in wanted.data:
        name = entry.name if entry.name in arrays or len(wanted.data) > 1 else "x"
        if name not in arrays:
            expected = f"'{entry.name}'" if len(wanted.data) > 1 or entry.name == "x" else f"'{entry.name}' or 'x'"
            raise DataError(f"{path}: no array {expected} for the model's input '{entry.name}'; the file has {available}")
        chosen[entry.name] = fit_data(arrays[name], entry, str(path))
    names: tuple[str, ...] | None = None
    if wanted.label is not None:
        label = wanted.label
        name = label.name if label.name in arrays or wanted.further_labels else "y"
        if name not in arrays:
            expected = f"'{label.name}'" if wanted.further_labels else f"'{label.name}' or 'y'"
            raise DataError(f"{path}: no array {expected} with the labels; the file has {available}")
        chosen[label.name], names = fit_label(arrays[name], label, str(path), classes)
    for label in wanted.further_labels:
        if label.name not in arrays:
            raise DataError(f"{path}: no array '{label.name}' for the loss; the file has {available}")
        chosen[label.name], _ = fit_label(arrays[label.name], label, str(path))
    try:
        return ArrayDataset(chosen, names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an archive by name, without unpickling.

    Raises:
        DataError: the file is damaged, is no ``.npz`` archive, or holds Python objects.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: a single array, not an archive; write it with numpy.savez(path, x=..., y=...)")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        if "pickle" in str(error):
            raise DataError(
                f"{path}: holds Python objects, or is no .npz file; burnish never unpickles. "
                "Write arrays of numbers or of text with numpy.savez(path, x=..., y=...)"
            ) from error
        raise DataError(f"{path}: damaged, or no .npz file ({error})") from error
