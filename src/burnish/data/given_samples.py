"""Samples to predict, given as paths, pictures, arrays, texts, or rows of a table in memory."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import onnx_ir as ir

from burnish.data.data_spec import DataSpec, fits
from burnish.data.dataset import ArrayDataset, Dataset
from burnish.data.formats import FORMATS, format_of
from burnish.data.huggingface import ColumnPicture, column_values, image_column, is_columnar, refuse_splits
from burnish.data.image.decoding import Picture
from burnish.data.image.reader import SUFFIXES
from burnish.data.image_folder import ImageFiles
from burnish.data.missing_values import PREDICTED, Columns
from burnish.data.preprocessing import PixelsLike, Preprocessing
from burnish.data.sound.dataset import SoundFiles
from burnish.data.sound.settings import SoundLike
from burnish.data.sound.wav import SUFFIX as WAV
from burnish.data.sources import read_data
from burnish.data.table import filled_inputs, rows_as_columns
from burnish.data.text.columns import TOKENS
from burnish.data.text.dataset import TextDataset
from burnish.data.text.settings import Text
from burnish.data.unlabelled import Samples, open_samples, row_names, unread_columns
from burnish.errors import DataError
from burnish.program import Entry

SOURCE = "data"
"""Name of in-memory samples in error messages."""
TAKEN = (
    "give a path, an image, an array, a text, a dict of arrays or columns, a data frame, or a list of paths, images, texts or "
    "arrays"
)
SUFFIXES_READ = frozenset({*SUFFIXES, WAV, *(suffix for form in FORMATS for suffix in form.suffixes)})
IMAGE_RANKS, CHANNELS = (3, 4), (1, 3, 4)
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Given:
    """Samples to predict, in their order.

    Attributes:
        parts: groups of samples that are read one after the other, such as files of different formats.
        is_one: True for a single sample: a photo, a text, or an array without a sample axis.
    """

    parts: tuple[Samples, ...]
    is_one: bool

    @property
    def notes(self) -> list[str]:
        """Remarks for the user on how the samples were read."""
        return [part.note for part in self.parts if part.note is not None]

    def __len__(self) -> int:
        return sum(len(part.dataset) for part in self.parts)


@dataclass(frozen=True, eq=False)
class _PictureInMemory:
    image: Any
    name: str

    def open(self) -> BinaryIO:
        file = io.BytesIO()
        # PNG cannot store floating-point pixels.
        form, exif = ("TIFF", None) if self.image.mode == "F" else ("PNG", self.image.getexif())
        image = self.image if form == "TIFF" or self.image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else None
        (image or self.image.convert("RGB")).save(file, form, **({"exif": exif} if exif else {}))
        file.seek(0)
        return file

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SampleReader:
    """Reads unlabeled samples for a model.

    Args:
        spec: inputs of the model.
        label: table column to leave out.
        image_size, pixels, sound: see ``open_dataset``.
        text_of: returns the tokenization for a path, or None for memory; None if the model reads no texts.
        cut: fits a dataset of texts to the model, with a note; see ``within_the_opened``.
    """

    spec: DataSpec
    label: str | None = None
    image_size: tuple[int, int] | None = None
    pixels: PixelsLike | None = None
    text_of: Callable[[str | Path | None], Text | None] = lambda path: None
    cut: Callable[[Dataset, Text, Callable[[Text], Dataset]], tuple[Dataset, str | None]] = lambda dataset, text, _: (
        dataset,
        None,
    )
    sound: SoundLike | None = None

    def open(self, source: Any) -> Given:
        """Open samples.

        Args:
            source: a path (see ``open_samples``), Pillow image, array with or without a sample axis, text, arrays by input name,
                table columns by name, data frame, dataset, or list of paths, images, texts, arrays or rows.

        Raises:
            DataError: there are no samples, or they do not fit the model.
            ConfigurationError: invalid ``pixels``.
        """
        if isinstance(source, str | os.PathLike):
            if self._is_text(source, alone=True):
                if self._reads_strings:
                    return replace(self._array(np.asarray([source])), is_one=True)
                return Given((self._texts([source], [source]),), True)
            return Given((self._path(Path(source)),), self._is_photo(source) or self._is_sound(source))
        if _is_image(source):
            return Given((self._pictures([_in_memory(source, 0)]),), True)
        refuse_splits(source)
        if is_columnar(source):
            return Given((self._columnar(source),), False)
        if isinstance(source, Dataset):
            return Given((Samples(source, "sample", row_names(len(source)), None),), False)
        if hasattr(source, "columns") and hasattr(source, "__getitem__") and not isinstance(source, Mapping):
            source = {str(name): np.asarray(source[name]) for name in source.columns}
        if isinstance(source, Mapping):
            return self._mapping(source)
        if isinstance(source, list | tuple):
            return self._several(source)
        if hasattr(source, "__array__") or isinstance(source, int | float):
            return self._array(np.asarray(source))
        raise DataError(f"no samples are made of a value of type {type(source).__name__}: {TAKEN}")

    def _several(self, items: Sequence[Any]) -> Given:
        if not items:
            raise DataError(f"the list is empty, and holds no sample to predict: {TAKEN}")
        if all(isinstance(item, str | os.PathLike) for item in items):
            if self._reads_strings:
                return self._array(np.asarray([str(item) for item in items]))
            return self._paths_and_texts(items)
        if all(isinstance(item, Mapping) for item in items):
            return self._rows(items)
        if all(map(_is_image, items)):
            return Given((self._pictures([_in_memory(item, index) for index, item in enumerate(items)]),), False)
        if any(isinstance(item, str | os.PathLike | Mapping) or _is_image(item) for item in items):
            kinds = ", ".join(sorted({type(item).__name__ for item in items}))
            raise DataError(f"a list of {kinds}: the samples of a list are of one kind: {TAKEN}")
        arrays = [np.asarray(item) for item in items]
        shapes = {array.shape for array in arrays}
        if len(shapes) == 1:
            return self._array(np.stack(arrays))
        if all(map(self._is_pixels, arrays)):
            return Given((self._pictures([_in_memory(_as_image(array), index) for index, array in enumerate(arrays)]),), False)
        shown = ", ".join(str(list(shape)) for shape in sorted(shapes))
        raise DataError(f"the samples of the list have different shapes, {shown}: give arrays of one shape, or photos as uint8")

    @property
    def _only(self) -> Entry | None:
        return self.spec.data[0] if len(self.spec.data) == 1 else None

    @property
    def _reads_strings(self) -> bool:
        return self._only is not None and self._only.dtype == ir.DataType.STRING

    def _is_photo(self, path: PathLike) -> bool:
        return Path(path).suffix.lower() in SUFFIXES and Path(path).is_file()

    def _is_sound(self, path: PathLike) -> bool:
        return Path(path).suffix.lower() == WAV and Path(path).is_file()

    def _is_text(self, item: PathLike, alone: bool) -> TypeGuard[str]:
        """True for a string that is a text rather than a path: the model reads texts, and it neither is nor looks like a file."""
        if not isinstance(item, str) or not (self._reads_strings or self.text_of(None) is not None):
            return False
        try:
            path = Path(item)
            is_there = path.exists() if alone else path.is_file() and path.suffix.lower() in SUFFIXES_READ
        except (OSError, ValueError):  # the string is too long for a file name, or has a NUL
            return True
        is_name = path.suffix.lower() in SUFFIXES_READ and not any(map(str.isspace, item))
        return not is_there and not is_name

    def _paths_and_texts(self, items: Sequence[PathLike]) -> Given:
        for item in items:
            if self._kind(item) == "path" and not Path(item).exists():
                format_of(Path(item))  # raises for a missing file before anything is read
        parts: list[Samples] = []
        for kind, group in groupby(items, self._kind):
            if kind == "text":
                texts = [str(text) for text in group]
                parts.append(self._texts(texts, texts))
            elif kind == "photo":
                parts.append(self._pictures([Path(path) for path in group]))
            elif kind == "sound":
                files = SoundFiles(Path(SOURCE), self.spec, self.sound, [Path(path) for path in group], all_read=True)
                parts.append(Samples(files, "file", files.names, None, files.note))
            else:
                parts += [self._path(Path(path), is_alone=len(items) == 1) for path in group]
        return Given(tuple(parts), False)

    def _kind(self, item: PathLike) -> str:
        if self._is_text(item, alone=False):
            return "text"
        return "photo" if self._is_photo(item) else "sound" if self._is_sound(item) else "path"

    def _path(self, path: Path, is_alone: bool = True) -> Samples:
        text = self.text_of(path)

        def opened(text: Text | None) -> Samples:
            options: dict[str, Any] = {"label": self.label, "image_size": self.image_size, "pixels": self.pixels}
            return open_samples(path, self.spec, **options, text=text, sound=self.sound)

        samples = opened(text)
        if text is not None:
            samples = self._within(samples, text, lambda other: opened(other).dataset)
        if is_alone or samples.kind != "row":
            return samples
        return replace(samples, kind="sample", names=[f"{path}:{name}" for name in samples.names])

    def _texts(self, texts: Any, names: Sequence[str] | None) -> Samples:
        text = self.text_of(None) or Text()
        spec = replace(self.spec, label=None, predicts=True)

        def opened(text: Text) -> TextDataset:
            return TextDataset(texts, text, spec, self.label)

        dataset = opened(text)
        called = names if names is not None and len(names) == len(dataset) else row_names(len(dataset))
        return self._within(Samples(dataset, "text" if names else "row", called, None, dataset.note), text, opened)

    def _within(self, samples: Samples, text: Text, reopened: Callable[[Text], Dataset]) -> Samples:
        dataset, cut = self.cut(samples.dataset, text, reopened)
        return replace(samples, dataset=dataset, note=cut or samples.note)

    def _pictures(self, pictures: Sequence[Picture]) -> Samples:
        """Return samples of images. All were named explicitly, so an unreadable one is an error."""

        def opened() -> ImageFiles:
            return ImageFiles(Path(SOURCE), self.spec, self.image_size, self.pixels, pictures, all_read=True)

        files = read_data("images", opened)
        return Samples(files, "file", files.names, files.preprocessing, files.note)

    def _columnar(self, source: Any) -> Samples:
        if self.text_of(None) is not None or TOKENS in source.column_names:
            return self._texts(source, None)
        if (column := image_column(source)) is not None:
            return self._pictures([ColumnPicture(source, column, row) for row in range(len(source))])
        return self._columns({name: column_values(source, name, keeps_missing=True) for name in source.column_names})

    def _rows(self, rows: Sequence[Mapping[str, Any]]) -> Given:
        names = list(rows[0])
        if self._is_of_texts(rows[0]):
            return Given((self._texts({name: [row.get(name) for row in rows] for name in names}, None),), False)
        for number, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                raise DataError(
                    f"row {number} has the columns {', '.join(map(str, row))}, and row 0 {', '.join(map(str, names))}"
                )
        return replace(self._mapping({name: np.asarray([row[name] for row in rows]) for name in names}), is_one=False)

    def _mapping(self, source: Mapping[str, Any]) -> Given:
        if self._is_of_texts(source):
            is_row = all(isinstance(value, str) for value in source.values())
            return Given((self._texts({name: [value] for name, value in source.items()} if is_row else source, None),), is_row)
        arrays = {str(name): _plain_array(value) for name, value in source.items()}
        is_named = all(entry.name in arrays for entry in self.spec.data)
        is_flat = bool(arrays) and all(array.ndim <= 1 for array in arrays.values())
        is_table = is_flat and self._reads_columns
        if is_named and not is_table and all(_is_single(arrays[entry.name], entry) for entry in self._with_samples):
            return self._arrays(arrays, True)
        if is_table or (is_flat and not (is_named and self._all_fit(arrays))):
            is_one = all(array.ndim == 0 for array in arrays.values())
            return Given((self._columns({name: np.atleast_1d(array) for name, array in arrays.items()}),), is_one)
        for entry in self.spec.data:
            if entry.name not in arrays:
                there = ", ".join(map(repr, arrays)) or "none"
                raise DataError(f"no array for the model's input '{entry.name}'; there is {there}")
        return self._arrays(arrays, False)

    def _is_of_texts(self, columns: Mapping[str, Any]) -> bool:
        """True if the columns hold texts for the model to tokenize; arrays by input name are tokens already."""
        return self.text_of(None) is not None and not all(entry.name in columns for entry in self.spec.data)

    @property
    def _reads_columns(self) -> bool:
        """True if the model takes a table by columns: several inputs with one value per sample."""
        return len(self.spec.data) > 1 and all(
            entry.sample_axis is not None and all(extent == 1 for extent in entry.extents[1:]) for entry in self.spec.data
        )

    @property
    def _with_samples(self) -> list[Entry]:
        return [entry for entry in self.spec.data if entry.sample_axis is not None]

    def _all_fit(self, arrays: Mapping[str, np.ndarray]) -> bool:
        return all(arrays[entry.name].ndim and fits(arrays[entry.name].shape, entry) for entry in self._with_samples)

    def _array(self, array: np.ndarray) -> Given:
        entry = self.spec.only_data(SOURCE)
        array = _plain_array(array)
        if _is_single(array, entry) or (not array.ndim and fits((1,), entry)):
            return self._arrays({entry.name: array}, True)
        does_fit = array.ndim > 0 and fits(array.shape, entry)
        if not does_fit and self._is_pixels(array):
            return Given((self._pictures([_in_memory(_as_image(array), 0)]),), True)
        if not does_fit and array.ndim == IMAGE_RANKS[-1] and len(array) and self._is_pixels(array[0]):
            return Given((self._pictures([_in_memory(_as_image(each), at) for at, each in enumerate(array)]),), False)
        return self._arrays({entry.name: array}, False)

    def _is_pixels(self, array: np.ndarray) -> bool:
        """True for a uint8 photo, [height, width] or with 1, 3 or 4 channels first or last, if the model takes images."""
        if self._only is None or len(self._only.extents) not in IMAGE_RANKS or array.dtype != np.uint8 or not array.size:
            return False
        return array.ndim == 2 or (array.ndim == 3 and bool({array.shape[0], array.shape[-1]} & {*CHANNELS}))

    def _arrays(self, arrays: Mapping[str, np.ndarray], is_one: bool) -> Given:
        """Return samples of arrays by input name; ``is_one``: without a sample axis."""
        taken = {entry.name: arrays[entry.name] for entry in self.spec.data}
        if is_one:
            taken |= {entry.name: taken[entry.name][None] for entry in self._with_samples}
        if self._only is not None and (columns := rows_as_columns(taken[self._only.name], self.spec, SOURCE)) is not None:
            return Given((self._columns(columns),), is_one)
        fitted, preprocessing = self.spec.samples(taken, SOURCE, self.pixels)
        dataset = ArrayDataset(fitted, shared=self.spec.shared(fitted))
        sides = None if self._only is None else _sides(fitted[self._only.name], preprocessing)
        return Given((Samples(dataset, "row", row_names(len(dataset)), preprocessing, sides=sides),), is_one)

    def _columns(self, columns: Mapping[str, np.ndarray]) -> Samples:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            counts = ", ".join(f"'{name}' {length}" for name, length in lengths.items()) or "none"
            raise DataError(f"{SOURCE}: the columns differ in their number of rows: {counts}")
        left_out = unread_columns(list(columns), self.spec, self.label, SOURCE)
        features = Columns.of_arrays({name: column for name, column in columns.items() if name not in left_out})
        table = self.spec.described.table
        if table is None or not table.fills:
            features, _ = features.without_gaps(PREDICTED, SOURCE)
        for name, column in features.items():
            if column.dtype == object and all(value is None for value in column.tolist()):
                is_text = table is not None and dict(table.columns).get(name) is not None
                features[name] = np.full(len(column), "" if is_text else np.nan)
        filled, unseen = filled_inputs(features, self.spec, SOURCE, table)
        arrays, _ = self.spec.samples(filled, SOURCE)
        dataset = ArrayDataset(arrays, shared=self.spec.shared(arrays))
        return Samples(dataset, "row", row_names(len(dataset)), None, f"{SOURCE}: {'; '.join(unseen)}" if unseen else None)


def _is_image(value: object) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "save")


def _in_memory(image: Any, index: int) -> _PictureInMemory:
    return _PictureInMemory(image, str(getattr(image, "filename", "") or index))


def _as_image(array: np.ndarray) -> Any:
    from PIL import Image

    if array.ndim == 3 and array.shape[-1] not in CHANNELS:
        array = array.transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array))


def _plain_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    is_text = array.dtype == object and array.size and all(isinstance(item, str) for item in array.reshape(-1).tolist())
    return array.astype(str) if is_text else array


def _is_single(array: np.ndarray, entry: Entry) -> bool:
    """True for an array of one sample: it has a sample's shape or fits in another layout."""
    extents = entry.extents[1:]
    is_exact = array.ndim == len(extents) and all(
        not isinstance(extent, int) or extent == actual for actual, extent in zip(array.shape, extents, strict=True)
    )
    return is_exact or (array.ndim > 0 and not fits(array.shape, entry) and fits((1, *array.shape), entry))


def _sides(array: np.ndarray, preprocessing: Preprocessing | None) -> tuple[int, int] | None:
    """Return width and height of the pictures in a model's input array; None if it holds none."""
    if array.ndim != IMAGE_RANKS[-1]:
        return None
    is_last = preprocessing.layout == "NHWC" if preprocessing is not None else array.shape[1] not in CHANNELS
    height, width = array.shape[1:3] if is_last else array.shape[2:]
    return int(width), int(height)
