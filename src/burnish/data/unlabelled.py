"""Unlabeled samples for prediction, each with a name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from burnish.data.csv import HEADER
from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset, Dataset
from burnish.data.digits import digits_arrays
from burnish.data.formats import FORMATS, check_pixels, check_sound, check_text, format_of, read_table
from burnish.data.image.reader import SUFFIXES
from burnish.data.image_folder import ImageFiles
from burnish.data.label_coding import LABEL_COLUMNS
from burnish.data.missing_values import KEPT, PREDICTED
from burnish.data.numpy_files import MappedArrays, npz_inputs
from burnish.data.preprocessing import PixelsLike, Preprocessing
from burnish.data.sound.dataset import UNREAD as UNREAD_SOUNDS
from burnish.data.sound.dataset import SoundFiles
from burnish.data.sound.settings import SoundLike
from burnish.data.sound.wav import SUFFIX as WAV
from burnish.data.sources import read_data
from burnish.data.table import filled_inputs
from burnish.data.tar_shards import read_samples
from burnish.data.text.dataset import TextDataset
from burnish.data.text.settings import Text
from burnish.errors import DataError

ANNOTATED = {
    "coco": "it holds objects in the form of COCO",
    "voc": "it holds objects in the form of VOC beside 'JPEGImages'",
    "masks": "it holds masks beside 'images'",
}


@dataclass(frozen=True)
class Samples:
    """Samples to predict.

    Attributes:
        dataset: the inputs.
        kind: kind of names: ``file``, or ``row`` (counted from 0).
        names: name of each sample.
        preprocessing: preprocessing of pixels, or None.
        note: remarks for the user on how they were read.
        sides: width and height of pictures that are not files.
    """

    dataset: Dataset
    kind: str
    names: Sequence[str]
    preprocessing: Preprocessing | None
    note: str | None = None
    sides: tuple[int, int] | None = None

    @property
    def sizes(self) -> list[tuple[int, int]] | None:
        """Width and height of each picture; None if unknown."""
        if isinstance(self.dataset, ImageFiles):
            return self.dataset.sizes
        return None if self.sides is None else [self.sides] * len(self.names)


def open_samples(
    source: str | Path | Mapping[str, np.ndarray],
    spec: DataSpec,
    *,
    label: str | None = None,
    image_size: tuple[int, int] | None = None,
    pixels: PixelsLike | None = None,
    text: Text | None = None,
    sound: SoundLike | None = None,
) -> Samples:
    """Open data without their labels.

    Args:
        source: a source for ``open_dataset``, an image or .wav file, a folder of these without class folders, or arrays by input
            name, used unchanged.
        spec: inputs of the model.
        label: table column to leave out. By default, if there are more columns than the model takes, one called label, y or
            target, else the last.
        image_size, pixels, text, sound: see ``open_dataset``.

    Raises:
        DataError: no data, or data that are damaged or do not fit the model.
        ConfigurationError: invalid ``pixels``.
    """
    if isinstance(source, Mapping):
        given = {entry.name: _input(source, entry.name) for entry in spec.data}
        inputs = ArrayDataset(given, shared=spec.shared(given))
        return Samples(inputs, "row", row_names(len(inputs)), None)
    return read_data(source, _opened, source, spec, label, image_size, pixels, text, sound)


def _opened(
    source: str | Path,
    spec: DataSpec,
    label: str | None,
    image_size: tuple[int, int] | None,
    pixels: PixelsLike | None,
    text: Text | None,
    sound: SoundLike | None,
) -> Samples:
    path = Path(source)
    suffix = path.suffix.lower() if path.is_file() else ""
    file = "images" if suffix in SUFFIXES else "sounds" if suffix == WAV or suffix in UNREAD_SOUNDS else None
    form = format_of(source) if file is None else next(each for each in FORMATS if each.name == file)
    kind = form.name
    check_sound(source, form, sound)
    check_text(source, form, text)
    check_pixels(source, form, pixels)
    if kind in ANNOTATED:
        raise DataError(f"{source}: {ANNOTATED[kind]}, and predictions are of pictures alone: name the folder that holds them")
    if text is not None:
        texts = TextDataset(path, text, replace(spec, label=None, predicts=True), label)
        return Samples(texts, "row", row_names(len(texts)), None, texts.note)
    if kind == "tar":
        pictures = [image for image, _ in read_samples(source)]
        members = ImageFiles(path, spec, image_size, pixels, pictures)
        return Samples(members, "file", members.names, members.preprocessing, members.note)
    if kind in ("npy", "array"):
        mapped = MappedArrays(path, replace(spec, label=None, further_labels=()), pixels=pixels)
        return Samples(mapped, "row", row_names(len(mapped)), mapped.preprocessing)
    if kind == "sounds":
        sounds = SoundFiles(path, spec, sound)
        return Samples(sounds, "file", sounds.names, None, sounds.note)
    if kind == "images":
        files = ImageFiles(path, spec, image_size, pixels)
        return Samples(files, "file", files.names, files.preprocessing, files.note)
    described: Preprocessing | None = None
    note: str | None = None
    if kind == "npz":
        arrays, described, note = npz_inputs(path, spec, pixels)
    else:
        arrays, notes = _features(source, kind, spec, label)
        arrays, _ = spec.samples(arrays, str(source))
        note = f"{source}: {'; '.join(notes)}" if notes else None
    try:
        dataset = ArrayDataset(arrays, shared=spec.shared(arrays))
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    return Samples(dataset, "row", row_names(len(dataset)), described, note)


def _features(source: str | Path, kind: str, spec: DataSpec, label: str | None) -> tuple[dict[str, np.ndarray], list[str]]:
    if kind == "digits":
        return {spec.only_data(str(source)).name: digits_arrays("test" if str(source) == "digits:test" else "train")[0]}, []

    table = spec.described.table
    policy = KEPT if table is not None and table.fills else PREDICTED
    columns, notes = read_table(Path(source), policy, lambda names: unread_columns(names, spec, label, str(source)))
    doubt = [note for note in notes if note.startswith(HEADER)]
    filled, unseen = filled_inputs(columns, spec, str(source), table)
    return filled, doubt + unseen


def unread_columns(names: Sequence[str], spec: DataSpec, label: str | None, source: str) -> Collection[str]:
    """Return the columns of a table that are not features.

    Args:
        names: all columns.
        spec: inputs of the model.
        label: column to leave out.
        source: name for errors.

    Raises:
        DataError: there is no such column, and the number of the others does not fit the model.
    """
    takes = _columns_taken(spec)
    if takes is not None:
        return set(names) - takes
    known = spec.described.labels
    asked = () if label is None else (label,) if label in names else tuple(name.strip() for name in label.split(","))
    missing = next((name for name in asked if name not in names), None)
    if missing is not None and (len(names), True) != _features_taken(spec, source):
        raise DataError(f"{source}: no column '{missing}'; the columns are {', '.join(names)}")
    labels = {*asked} & {*names} or ({*known.columns} & {*names} if known is not None and not asked else set())
    if labels:
        return labels
    guessed = _guessed_label(names, spec, source)
    return () if guessed is None else {guessed}


def _columns_taken(spec: DataSpec) -> set[str] | None:
    """Return the names of the columns that a model takes; None if only their number counts."""
    if len(spec.data) > 1:
        return {entry.name for entry in spec.data}
    return None if spec.described.table is None else {name for name, _ in spec.described.table.columns}


def _features_taken(spec: DataSpec, source: str) -> tuple[int, bool]:
    """Return the number of values per sample of a model's only input, and True if all its extents are fixed."""
    extents = spec.only_data(source).extents[1:]
    known = [extent for extent in extents if isinstance(extent, int)]
    return math.prod(known), len(known) == len(extents)


def _guessed_label(columns: Sequence[str], spec: DataSpec, source: str) -> str | None:
    """Return the label column: one with a usual name, or the last if there is one column too many."""
    takes, is_known = _features_taken(spec, source)
    if is_known and len(columns) == takes:
        return None
    named = next((name for name in columns if name.lower() in LABEL_COLUMNS), None)
    return named or (columns[-1] if len(columns) == takes + 1 else None)


def _input(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise DataError(f"no array for the model's input '{name}'; there is {', '.join(map(repr, arrays)) or 'none'}")
    return np.asarray(arrays[name])


def row_names(count: int) -> list[str]:
    """Return names of rows, counted from 0."""
    return [str(index) for index in range(count)]
