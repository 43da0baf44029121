"""Data to predict: samples without labels, each with a name by which a person finds it."""

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
        dataset: their inputs.
        kind: what a name is: ``file``, or ``row``, counted from 0.
        names: of the samples, in their order.
        preprocessing: what is done to their pixels; None where they hold none.
        note: what a person should know about how they were read.
        sides: width and height of each picture, of those that are no files.
    """

    dataset: Dataset
    kind: str
    names: Sequence[str]
    preprocessing: Preprocessing | None
    note: str | None = None
    sides: tuple[int, int] | None = None

    @property
    def sizes(self) -> list[tuple[int, int]] | None:
        """Width and height of each picture; None if they are not known, or there are none."""
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
        source: what ``open_dataset`` takes, an image or a .wav file, or a folder of these without subfolders for classes; or
            arrays by input name, which are taken as they are.
        spec: what the model takes.
        label: a column of a table to leave out. By default, where the table has more columns than the model takes, one that is
            called label, y or target, else the last.
        image_size, pixels, text, sound: as ``open_dataset`` takes them.

    Raises:
        DataError: nothing there, damaged data, or data that do not fit the model.
        ConfigurationError: no such pixels.
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
    """Return an array for each input, and what a person should know of them."""
    if kind == "digits":
        return {spec.only_data(str(source)).name: digits_arrays("test" if str(source) == "digits:test" else "train")[0]}, []

    table = spec.described.table
    policy = KEPT if table is not None and table.fills else PREDICTED
    columns, notes = read_table(Path(source), policy, lambda names: unread_columns(names, spec, label, str(source)))
    doubt = [note for note in notes if note.startswith(HEADER)]
    filled, unseen = filled_inputs(columns, spec, str(source), table)
    return filled, doubt + unseen


def unread_columns(names: Sequence[str], spec: DataSpec, label: str | None, source: str) -> Collection[str]:
    """Return the columns of a table that are no features.

    Args:
        names: of all columns.
        spec: what the model takes.
        label: a column to leave out.
        source: what to call the table in an error.

    Raises:
        DataError: there is no such column, and the others are not as many as the model takes.
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
    """Return the names of the columns that a model reads; None if they are told by their number alone."""
    if len(spec.data) > 1:
        return {entry.name for entry in spec.data}
    return None if spec.described.table is None else {name for name, _ in spec.described.table.columns}


def _features_taken(spec: DataSpec, source: str) -> tuple[int, bool]:
    """Return how many numbers the only input of a model takes of a sample, and True if none of its extents is open."""
    extents = spec.only_data(source).extents[1:]
    known = [extent for extent in extents if isinstance(extent, int)]
    return math.prod(known), len(known) == len(extents)


def _guessed_label(columns: Sequence[str], spec: DataSpec, source: str) -> str | None:
    """Return the column that is no feature: one named as a label, or the last where there is one more than the model takes."""
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
    """Return the names of rows, which are counted from 0."""
    return [str(index) for index in range(count)]
