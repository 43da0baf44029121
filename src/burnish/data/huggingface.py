"""Hugging Face ``datasets``: columns of values, images and labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset, group_values
from burnish.data.image.labelled import LabelledImages, check_class_count, label_of_images
from burnish.data.image.reader import reader_for
from burnish.data.label_coding import LABEL_COLUMNS, are_lists, label_columns
from burnish.data.preprocessing import PixelsLike
from burnish.data.splitting import EvalSplit
from burnish.data.table import table_dataset
from burnish.errors import DataError


def is_columnar(source: object) -> bool:
    """True for a Hugging Face dataset or an object with the same column interface."""
    is_sized = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return is_sized and isinstance(getattr(source, "column_names", None), list)


def refuse_splits(source: object) -> None:
    """Raise DataError for a mapping of splits, as Hugging Face ``datasets`` loads it, and for a stream of samples."""
    held = source if isinstance(source, Mapping) else {}
    if held and all(hasattr(each, "column_names") for each in held.values()):
        names = [*map(str, held)]
        raise DataError(
            f"data: {len(held)} data sets, {', '.join(map(repr, names))}: give one of them, such as data['{names[0]}'], and "
            "another as eval_data"
        )
    if hasattr(source, "column_names") and not hasattr(source, "__len__"):
        raise DataError(
            f"data: an {type(source).__name__} gives one sample after another, and does not say how many: give batches of it, "
            "burnish.data.Batches(data.batch(32), steps=100), with columns called as the inputs and labels of the program"
        )


def class_names(source: Any, column: str, inner: bool = False) -> list[str] | None:
    """Return the class names of a ``ClassLabel`` column; None for other columns.

    Args:
        source: the dataset.
        column: name of the column.
        inner: True if the column holds lists of class indices.
    """
    features = getattr(source, "features", None) or {}
    feature = features.get(column)
    names = getattr(getattr(feature, "feature", None) if inner else feature, "names", None)
    return None if names is None else [*map(str, names)]


def class_column(source: Any, columns: Sequence[str]) -> str | None:
    """Return the label column: one with a usual name, or the only ``ClassLabel``; None if there is none.

    Raises:
        DataError: several columns hold classes, and none has a usual name.
    """
    named = next((name for name in columns if name.lower() in LABEL_COLUMNS), None)
    if named is not None:
        return named
    holding = [name for name in columns if class_names(source, name) is not None]
    if len(holding) > 1:
        raise DataError(
            f"data: the columns {', '.join(map(repr, holding))} hold classes, and none is called label, y or target: rename the "
            f"one that is meant, data.rename_column('{holding[0]}', 'label')"
        )
    return holding[0] if holding else None


def named_labels(source: Any, column: str) -> tuple[np.ndarray, list[str] | None]:
    """Return the labels in a column (as names if its feature has names), and the names.

    Raises:
        DataError: a label is missing or not one of the classes.
    """
    held = source[column][:]
    if are_lists(held):
        return _lists(held, class_names(source, column, inner=True)), class_names(source, column, inner=True)
    labels, names = column_values(source, column), class_names(source, column)
    if names is None or labels.dtype.kind not in "iu":
        return labels, names
    wrong = labels[(labels < 0) | (labels >= len(names))]
    if wrong.size:
        raise DataError(
            f"data: the label {wrong.reshape(-1)[0]} in the column '{column}' is none of the {len(names)} classes; leave these "
            f"samples out, data.filter(lambda row: row['{column}'] >= 0)"
        )
    return np.asarray(names)[labels], names


def _lists(held: Sequence[Sequence[Any]], names: Sequence[str] | None) -> np.ndarray:
    lists = np.empty(len(held), object)
    for row, labels in enumerate(held):
        wrong = [label for label in labels if names is not None and not 0 <= int(label) < len(names)]
        if wrong and names is not None:
            raise DataError(f"data, row {row}: the label {wrong[0]} is none of the {len(names)} classes; leave such rows out")
        lists[row] = [labels[index] if names is None else names[labels[index]] for index in range(len(labels))]
    return lists


def column_values(source: Any, column: str, keeps_missing: bool = False) -> np.ndarray:
    """Return the values of a column [rows, ...]; arrays of bytes as uint8.

    Args:
        source: the dataset.
        column: name of the column.
        keeps_missing: True to keep None for missing values, in an object array.

    Raises:
        DataError: a value is missing, or rows are lists of different lengths.
    """
    try:
        array = np.asarray(source[column][:])
    except ValueError as error:
        raise DataError(f"data: column '{column}' holds lists of different lengths ({error}); give all the same") from error
    held = array.tolist() if array.dtype == object else []
    missing = next((row for row, value in enumerate(held) if value is None), None)
    if missing is not None and keeps_missing:
        return array
    if missing is not None:
        raise DataError(
            f"data, row {missing}: column '{column}' has no value; fill it in, or leave such rows out, "
            f"data.filter(lambda row: row['{column}'] is not None)"
        )
    if held and all(isinstance(value, str) for value in held):
        return array.astype(str)
    features = getattr(source, "features", None) or {}
    return array.astype(np.uint8) if array.ndim > 1 and _element_type(features.get(column)) == "uint8" else array


def columns_dataset(
    source: Any,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    pixels: PixelsLike | None = None,
    split: EvalSplit | None = None,
    label: str | None = None,
    how: Mapping[str, Any] | None = None,
) -> ArrayDataset:
    """Make a dataset of columns of numbers, text or arrays.

    Args:
        source: the Hugging Face dataset.
        spec: inputs of the program.
        classes: class names by index.
        pixels: preprocessing of bytes.
        split: evaluation split; its column of groups is not a feature.
        label: label column (see ``table_dataset``); None searches by names and features.
        how: further options of ``table_dataset``.

    Raises:
        DataError: a value is missing or of another kind, or the data do not fit the program.
    """
    group = None if split is None else split.group
    names = source.column_names
    rest, known = [name for name in names if name != group], spec.described.labels
    told = label is None and not (known is not None and {*known.columns} <= {*rest})
    label = class_column(source, rest) if told else label
    chosen = label_columns(rest, label, "data", known)
    columns = {name: column_values(source, name, keeps_missing=name != group) for name in names if name not in chosen}
    if len(chosen) == 1:
        values, of_classes = named_labels(source, chosen[0])
        columns = {name: columns[name] if name not in chosen else values for name in names}
        classes = classes or (spec.class_order(of_classes) if of_classes else None)
    else:
        columns = {name: columns[name] if name not in chosen else column_values(source, name) for name in names}
    features = [name for name in rest if name not in chosen]
    arrays = [name for name in features if columns[name].ndim > 1]
    if arrays and len(spec.data) == 1 and len(features) > 1:
        raise DataError(
            f"data: the columns {', '.join(map(repr, features))} are to fill the model's one input, and '{arrays[0]}' holds "
            f"arrays: leave the others out, data.select_columns(['{arrays[0]}', ...])"
        )
    return table_dataset(columns, spec, label, "data", classes, pixels=pixels, split=split, **(how or {}))


def _element_type(feature: Any) -> str | None:
    while not isinstance(getattr(feature, "dtype", None), str) or getattr(feature, "feature", None) is not None:
        if getattr(feature, "feature", None) is None:
            return None
        feature = feature.feature
    return str(feature.dtype)


@dataclass(frozen=True)
class ColumnPicture:
    """An image in a row of a dataset."""

    source: Any = field(repr=False, compare=False)
    column: str
    row: int

    def open(self) -> BinaryIO:
        """Return the stored image file; decoded images are encoded without loss."""
        held = self.source[self.row][self.column]
        if isinstance(held, Mapping) and held.get("bytes") is not None:
            return io.BytesIO(held["bytes"])
        if not hasattr(held, "save"):
            raise ValueError(f"a value of type {type(held).__name__}")
        file = io.BytesIO()
        held.save(file, "TIFF")
        file.seek(0)
        return file

    def __str__(self) -> str:
        return f"row {self.row}, column '{self.column}'"


def image_column(source: Any) -> str | None:
    """Return the column that holds images; None if there is none."""
    features = getattr(source, "features", None) or {}
    named = next((name for name in source.column_names if type(features.get(name)).__name__ == "Image"), None)
    if named is not None or not len(source):
        return named
    try:
        first = source[0]
    except (KeyError, TypeError):  # an object with access by column name only
        return None
    if not isinstance(first, Mapping):
        return None
    return next((name for name, value in first.items() if type(value).__module__.startswith("PIL.")), None)


class ColumnImages(LabelledImages):
    """The images of a Hugging Face dataset.

    Args:
        source: the dataset; ``source[row]`` is a mapping by column.
        column: the image column.
        spec, classes, size, pixels: see ``ImageFolder``.
        group: the column of groups.

    Raises:
        DataError: there is no class column, or the data do not fit the program.
    """

    def __init__(
        self,
        source: Any,
        column: str,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
        group: str | None = None,
    ):
        label_of_images(spec, "data")
        reader = reader_for(spec, "data", size, pixels)
        others = [name for name in source.column_names if name not in (column, group)]
        told = class_column(source, others)
        label = told or label_columns([column, *others], None, "data")[0]
        labels, names = named_labels(source, label)
        if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
            raise DataError(f"data: the column '{label}' holds {labels.dtype}, and a class is an index or a name")
        if labels.dtype.kind in "US":
            text = labels.astype(str).tolist()
            names = list(classes or spec.class_order(names or sorted(set(text))))
            unknown = next((name for name in text if name not in names), None)
            if unknown is not None:
                raise DataError(f"data: class '{unknown}' is not among the classes that are trained: {', '.join(names)}")
            place = {name: index for index, name in enumerate(names)}
            labels = np.asarray([place[name] for name in text])
        elif labels.min() < 0:
            raise DataError(f"data: the label {int(labels.min())} is none of the classes; leave these samples out")
        names = names or [str(index) for index in range(int(labels.max()) + 1)]
        guess = f"no column is called label, y or target; '{label}', the last, is taken for the label"
        check_class_count(names, spec, "data")
        undecoded = _undecoded(source, column, (getattr(source, "features", None) or {}).get(column))
        pictures = [ColumnPicture(undecoded, column, row) for row in range(len(source))]
        super().__init__(pictures, labels.tolist(), names, spec, reader, "data", [] if told else [guess])
        self.by = f"'{label}'"
        if group is not None:
            available = ", ".join(map(repr, source.column_names))
            values = column_values(source, group) if group in source.column_names else None
            self.groups = group_values(values, group, "data", available)


def _undecoded(source: Any, column: str, feature: Any) -> Any:
    """Return the dataset with undecoded image files, if it can: large JPEG files then decode faster at a smaller size."""
    if feature is None or not hasattr(source, "cast_column"):
        return source
    try:
        return source.cast_column(column, type(feature)(decode=False))
    except TypeError:  # an unrelated class with this name
        return source
