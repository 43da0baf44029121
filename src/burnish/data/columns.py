"""Columns of a data set of Hugging Face ``datasets``: their values, and which of them holds the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.dataset import ArrayDataset
from burnish.data.pixel_presets import PixelsLike
from burnish.data.table import LABEL_COLUMNS, label_column, table_dataset
from burnish.errors import DataError


def is_columnar(source: object) -> bool:
    """Whether something is a data set of Hugging Face ``datasets``, or has its columns in the same way."""
    is_sized = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return is_sized and isinstance(getattr(source, "column_names", None), list)


def refuse_splits(source: object) -> None:
    """Raise DataError for several data sets by name, as Hugging Face ``datasets`` loads them, and for a stream of samples."""
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


def class_names(source: Any, column: str) -> list[str] | None:
    """Return the names of the classes that a column holds indices of (``ClassLabel``); None where it is no such column."""
    features = getattr(source, "features", None) or {}
    names = getattr(features.get(column), "names", None)
    return None if names is None else [*map(str, names)]


def class_column(source: Any, columns: Sequence[str]) -> str | None:
    """Return the column that holds the labels, where names or features tell: one with a usual name, or the only ``ClassLabel``.

    Raises:
        DataError: several hold classes, and none has a usual name.
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
    """Return the labels that a column holds, by name where its feature knows the names, and these.

    Raises:
        DataError: a label is missing, or none of the classes.
    """
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


def column_values(source: Any, column: str) -> np.ndarray:
    """Return the values of a column [rows, ...]; arrays of bytes as uint8.

    Raises:
        DataError: a value is missing, or its rows are lists of different lengths.
    """
    try:
        array = np.asarray(source[column][:])
    except ValueError as error:
        raise DataError(f"data: column '{column}' holds lists of different lengths ({error}); give all the same") from error
    held = array.tolist() if array.dtype == object else []
    missing = next((row for row, value in enumerate(held) if value is None), None)
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
    source: Any, spec: DataSpec, classes: Sequence[str] | None = None, pixels: PixelsLike | None = None
) -> ArrayDataset:
    """Make a data set of columns of numbers, text or arrays.

    Args:
        source: the data set.
        spec: what the program takes.
        classes: names of the classes in the order of their indices.
        pixels: what is done to arrays of bytes.

    Raises:
        DataError: a missing value, a column of something else, or what does not fit the program.
    """
    label = class_column(source, source.column_names)
    columns = {name: column_values(source, name) for name in source.column_names if name != label}
    if label is not None:
        values, names = named_labels(source, label)
        columns = {name: columns[name] if name != label else values for name in source.column_names}
        classes = classes or (spec.class_order(names) if names else None)
    features = [name for name in columns if name != label_column([*columns], label, "data")]
    arrays = [name for name in features if columns[name].ndim > 1]
    if arrays and len(spec.data) == 1 and len(features) > 1:
        raise DataError(
            f"data: the columns {', '.join(map(repr, features))} are to fill the model's one input, and '{arrays[0]}' holds "
            f"arrays: leave the others out, data.select_columns(['{arrays[0]}', ...])"
        )
    return table_dataset(columns, spec, label, "data", classes, pixels=pixels)


def _element_type(feature: Any) -> str | None:
    """The dtype of the numbers in arrays or lists, as a feature names it."""
    while not isinstance(getattr(feature, "dtype", None), str) or getattr(feature, "feature", None) is not None:
        if getattr(feature, "feature", None) is None:
            return None
        feature = feature.feature
    return str(feature.dtype)
