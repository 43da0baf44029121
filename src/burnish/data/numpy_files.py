"""NumPy files: an ``.npz`` archive, or ``.npy`` files that are read batch by batch."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from burnish.data.data_spec import DataSpec, fit_data, fit_label, turned_inputs
from burnish.data.dataset import ArrayDataset, Dataset, group_values
from burnish.data.file_rows import FileRows, file_rows
from burnish.data.label_coding import LABEL_COLUMNS
from burnish.data.model_metadata import DataDescription
from burnish.data.part import Part
from burnish.data.preprocessing import PixelsLike, Preprocessing, takes_bytes
from burnish.errors import DataError
from burnish.program import Entry
from burnish.untrusted_files import UNREADABLE, memory_excess

ENCRYPTED = 0x1
"""Flag of an encrypted zip entry."""
LARGEST_COMPRESSION = 1032
"""Deflate's largest ratio; an archive that claims more is damaged."""
DAMAGE = (
    *UNREADABLE,
    *(EOFError, NotImplementedError, RuntimeError, SyntaxError, zlib.error, tokenize.TokenError, zipfile.BadZipFile),
)
"""Exceptions that NumPy and zipfile raise for damaged files."""
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(
    path: Path,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    pixels: PixelsLike | None = None,
    group: str | None = None,
) -> ArrayDataset:
    """Read an ``.npz`` file, without unpickling.

    The archive holds one array per input, by the input's name; a single data input may be called ``x`` and the label ``y``.
    Arrays of bytes are pixels (see ``pixels``).

    Raises:
        DataError: the file is not an archive of arrays, lacks one, holds Python objects, or does not fit the model.
    """
    arrays = read_npz(path)
    available, groups = _available(arrays), None
    if group is not None:
        groups = group_values(arrays.pop(group, None), group, str(path), available)
    chosen, described = _inputs(arrays, path, spec, pixels)
    names: tuple[str, ...] | None = None
    if spec.label is not None:
        label = spec.label
        name = label.name if label.name in arrays or spec.further_labels else "y"
        if name not in arrays:
            expected = f"'{label.name}'" if spec.further_labels else f"'{label.name}' or 'y'"
            raise DataError(f"{path}: no array {expected} with the labels; the file has {available}; add the labels")
        chosen[label.name], names = fit_label(arrays[name], label, str(path), classes, spec)
    for label in spec.further_labels:
        if label.name not in arrays:
            raise DataError(f"{path}: no array '{label.name}' for the loss; the file has {available}")
        chosen[label.name], _ = fit_label(arrays[label.name], label, str(path))
    try:
        dataset = ArrayDataset(chosen, names, _note(arrays, spec, path), described, shared=spec.shared(chosen), groups=groups)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if spec.label is not None:
        dataset.by = f"'{name}'"
    return dataset


def npz_inputs(
    path: Path, spec: DataSpec, pixels: PixelsLike | None = None
) -> tuple[dict[str, np.ndarray], Preprocessing | None, str | None]:
    """Return the arrays of the model's inputs, the preprocessing of pixels, and a note on unused arrays.

    Raises:
        DataError: see ``open_npz``.
    """
    arrays = read_npz(path)
    return *_inputs(arrays, path, spec, pixels), _note(arrays, spec, path)


def _inputs(
    arrays: Mapping[str, np.ndarray], path: Path, spec: DataSpec, pixels: PixelsLike | None
) -> tuple[dict[str, np.ndarray], Preprocessing | None]:
    return spec.samples(_chosen(arrays, path, spec), str(path), pixels)


def _chosen(arrays: Mapping[str, np.ndarray], path: Path, spec: DataSpec) -> dict[str, np.ndarray]:
    chosen: dict[str, np.ndarray] = {}
    for entry in spec.data:
        name = entry.name if entry.name in arrays or len(spec.data) > 1 else "x"
        if name not in arrays:
            expected = f"'{entry.name}'" if len(spec.data) > 1 or entry.name == "x" else f"'{entry.name}' or 'x'"
            raise DataError(
                f"{path}: no array {expected} for the model's input '{entry.name}'; the file has {_available(arrays)}"
            )
        chosen[entry.name] = arrays[name]
    return chosen


def _note(arrays: Mapping[str, np.ndarray], spec: DataSpec, path: Path) -> str | None:
    unread = unread_note(arrays, spec, path)
    turned = turned_inputs(_chosen(arrays, path, spec), spec.data)
    if turned is None:
        return unread
    return f"{path}: {turned}" if unread is None else f"{unread}; {turned}"


def unread_note(arrays: Mapping[str, np.ndarray], spec: DataSpec, path: Path) -> str | None:
    """Return a note on unused arrays, or None; for prediction, labels may be unused."""
    read = {name if name in arrays or len(spec.data) > 1 else "x" for name in (entry.name for entry in spec.data)}
    if spec.label is not None:
        read |= {spec.label.name if spec.label.name in arrays or spec.further_labels else "y"}
        read |= {label.name for label in spec.further_labels}
    unread = [name for name in arrays if name not in read]
    if spec.predicts:
        unread = [name for name in unread if name.partition(":")[0].lower() not in LABEL_COLUMNS]
    if not unread:
        return None
    return f"{path}: nothing reads the array{'s' * (len(unread) > 1)} {', '.join(map(repr, unread))}"


def _available(arrays: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"'{name}' {list(array.shape)}" for name, array in arrays.items()) or "none"


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an archive by name, without unpickling. Their size is checked before memory is allocated.

    Raises:
        DataError: the file is damaged, not an ``.npz`` archive, or holds Python objects.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: a single array, not an archive; write it with numpy.savez(path, x=..., y=...)")
        with archive:
            entries = archive.zip.infolist()  # type: ignore[union-attr]  # it is open
            for entry in entries:
                _check_entry(archive.zip, entry, path)  # type: ignore[arg-type]
            excess = memory_excess(sum(entry.file_size for entry in entries), path.stat().st_size)
            if excess is not None:
                raise MemoryError(excess)
            return {name: archive[name] for name in archive.files}
    except MemoryError as error:
        raise DataError(f"{path}: its arrays take more memory than there is ({error}); give a part of them") from error
    except PermissionError:
        raise  # the file may be intact
    except DAMAGE as error:
        if "pickle" in str(error):
            raise DataError(
                f"{path}: holds Python objects, or is no .npz file; burnish never unpickles. "
                "Write arrays of numbers or of text with numpy.savez(path, x=..., y=...)"
            ) from error
        raise DataError(
            f"{path}: damaged, or no .npz file ({error}); write it again with numpy.savez, or check that it was copied whole"
        ) from error


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
    """Check that an entry is a plain array with the size in its header, before memory is allocated."""
    name = entry.filename.removesuffix(".npy")
    if entry.flag_bits & ENCRYPTED:
        raise DataError(f"{path}: the array '{name}' is encrypted; write it with numpy.savez(path, x=..., y=...)")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(
                f"'{name}' is of version {version[0]}.{version[1]} of the format, and 1.0 and 2.0 hold arrays of numbers"
            )
        shape, _, dtype = _HEADERS[version](file)
        begin = file.tell()
    if dtype.hasobject:
        raise ValueError(f"'{name}' holds objects, which are pickled")
    size = math.prod(shape) * dtype.itemsize
    held = there = entry.file_size - begin
    if entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        there = min(held, entry.compress_size * LARGEST_COMPRESSION)
    if min(shape, default=0) < 0 or size != held or size != there:
        claimed = f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size:,} bytes"
        raise ValueError(
            f"the header of '{name}' claims {claimed}, shape {list(shape)} of {dtype}, and {there:,} bytes can be there"
        )


SUFFIX = ".npy"


class MappedArrays:
    """A folder of ``<input>.npy`` files, or a single ``.npy`` file with its labels in another one.

    A single input may be ``x.npy``, the labels ``y.npy``. Inputs are read and fitted by batch (``FileRows``); labels, and inputs
    without samples, are read whole. Nothing is unpickled.

    Args:
        path: the folder or the file.
        spec: inputs of the program.
        classes: class names by index.
        pixels: preprocessing of bytes; see ``open_dataset``.
        label: label file of a single file.
        group: name of the array of groups.

    Attributes:
        classes: class names, if labels are names.
        preprocessing: preprocessing of bytes, or None.
        note: remarks for the user.
        groups: group of each sample, or None.

    Raises:
        DataError: an array is missing, damaged, of Python objects or another length, or does not fit.
    """

    def __init__(
        self,
        path: Path,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        pixels: PixelsLike | None = None,
        group: str | None = None,
        label: str | None = None,
    ):
        self._source = str(path)
        self._entries = spec.data
        if path.is_dir():
            self._paths = {entry.name: _file(path, entry.name, "x", len(spec.data) == 1) for entry in spec.data}
        else:
            self._paths = {spec.only_data(self._source).name: path}
        self._arrays = {name: _rows(file) for name, file in self._paths.items()}
        # Stand-ins that have only a shape and a dtype.
        forms = {name: np.broadcast_to(np.empty((), rows.dtype), rows.shape) for name, rows in self._arrays.items()}
        bytes_of = [entry for entry in spec.data if takes_bytes(forms[entry.name], entry)]
        self.preprocessing = spec.preprocessing_for(bytes_of[0], pixels) if bytes_of else None
        if pixels is not None and not bytes_of:
            raise DataError(f"{path}: its numbers are taken as they are; pixels says what is done to bytes (uint8): leave it out")
        self._labels: dict[str, np.ndarray] = {}
        self._paths_of_labels: dict[str, Path] = {}
        self.classes: tuple[str, ...] | None = None
        for entry in (spec.label, *spec.further_labels):
            if entry is not None:
                is_folder = path.is_dir()
                file = _file(path, entry.name, "y", not spec.further_labels) if is_folder else _labels_beside(path, spec, label)
                self._paths_of_labels[entry.name], read = file, np.array(_open(file))
                self._labels[entry.name], names = fit_label(read, entry, str(file), classes, spec)
                self.classes = self.classes or names
        self._shared = spec.shared(forms)
        held = {**self._arrays, **self._labels}
        lengths = {name: len(array) for name, array in held.items() if name not in self._shared}
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            files = {} if path.is_dir() else {**self._paths, **self._paths_of_labels}
            counts = ", ".join(f"'{files.get(name, Path(name)).name}' {length}" for name, length in lengths.items())
            raise DataError(f"{path}: its arrays hold {counts} samples; each sample needs one entry in every array")
        self._length = next(iter(lengths.values()))
        self.groups = None if group is None else _groups(path, group, self._length)
        turned = turned_inputs(forms, spec.data)
        self.note = None if turned is None else f"{path}: {turned}"
        # Raises now, rather than in training, if the arrays do not fit.
        self.batch(np.arange(1))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices``.

        Raises:
            DataError: a value is not finite or does not fit the input's dtype; or a file was truncated or cannot be read.
        """
        indices = np.asarray(indices, np.int64)
        batch = {}
        for entry in self._entries:
            rows = self._arrays[entry.name]
            array = rows[np.arange(len(rows)) if entry.name in self._shared else indices]
            samples = None if entry.name in self._shared else indices
            batch[entry.name] = fit_data(array, entry, str(self._paths[entry.name]), self.preprocessing, samples)
        return {**batch, **{name: labels[indices] for name, labels in self._labels.items()}}

    @property
    def divisible(self) -> int:
        return len(self)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the class of each sample and what defines it, in words; None if the labels are not class indices."""
        labels = None if label is None else self._labels.get(label.name)
        if labels is None or label is None or label.dtype.is_floating_point() or labels.size != len(self):
            return None
        return labels.reshape(-1), f"'{self._paths_of_labels[label.name].stem}'"

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Dataset:
        """Return some samples, which stay in the files."""
        return Part(self, indices, like)


def _labels_beside(path: Path, spec: DataSpec, label: str | None) -> Path:
    spec.only_label(str(path))
    if label is None:
        raise DataError(
            f"{path}: it holds one array, and its labels are in another file: name that (label='y.npy', --label y.npy), or give "
            "a folder with x.npy and y.npy"
        )
    file = Path(label)
    if file.suffix.lower() != SUFFIX or not file.is_file():
        what = "is no such file" if file.suffix.lower() == SUFFIX else "is no .npy file"
        raise DataError(f"{path}: --label {label} {what}; name the .npy file with the labels (label='y.npy', --label y.npy)")
    return file


def _groups(path: Path, group: str, length: int) -> np.ndarray:
    there = ", ".join(f"'{each.stem}'" for each in sorted(path.glob(f"*{SUFFIX}")))
    file = path / f"{group}{SUFFIX}"
    known = file.name in {each.name for each in path.glob(f"*{SUFFIX}")}  # reads only files in the folder
    groups = group_values(np.array(_open(file)) if known else None, group, str(path), there)
    if len(groups) != length:
        raise DataError(f"{path}: '{group}' has {len(groups)} entries, and there are {length} samples; each needs one")
    return groups


def _file(path: Path, name: str, short: str, alone: bool) -> Path:
    names = [name, short] if alone else [name]
    file = next((path / f"{each}{SUFFIX}" for each in names if (path / f"{each}{SUFFIX}").is_file()), None)
    if file is None:
        there = ", ".join(sorted(each.name for each in path.glob(f"*{SUFFIX}"))) or "none"
        raise DataError(f"{path}: no array {' or '.join(f'{each}{SUFFIX}' for each in names)}; the folder has {there}")
    return file


def _rows(path: Path) -> FileRows | np.ndarray:
    """Return an array in a file as rows to read on demand; in Fortran order it is read whole."""
    mapped = _open(path)
    return file_rows(mapped) or np.array(mapped)


def _open(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGE as error:
        raise DataError(
            f"{path}: damaged, no .npy file, or one of Python objects ({error}), which are never unpickled; write an array of "
            "numbers or of text with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim == 0 or math.prod(array.shape) == 0:
        raise DataError(f"{path}: no samples; the first axis of an array counts them")
    return array
