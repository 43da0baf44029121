"""Images in a column of a data set of Hugging Face ``datasets``, with their classes in another."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from burnish.data.columns import class_column, named_labels
from burnish.data.data_spec import DataSpec
from burnish.data.image.labelled import LabelledImages, check_class_count, label_of_images
from burnish.data.image.reader import reader_for
from burnish.data.pixel_presets import PixelsLike
from burnish.data.table import label_column
from burnish.errors import DataError


@dataclass(frozen=True)
class ColumnPicture:
    """An image of a data set, by its row."""

    source: Any = field(repr=False, compare=False)
    column: str
    row: int

    def open(self) -> BinaryIO:
        """Return the file that the data set holds; of a decoded image, one without loss."""
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
    """Return the column of a data set that holds images; None where none does."""
    features = getattr(source, "features", None) or {}
    named = next((name for name in source.column_names if type(features.get(name)).__name__ == "Image"), None)
    if named is not None or not len(source):
        return named
    try:
        first = source[0]
    except (KeyError, TypeError):  # what has columns by name alone
        return None
    if not isinstance(first, Mapping):
        return None
    return next((name for name, value in first.items() if type(value).__module__.startswith("PIL.")), None)


class ColumnImages(LabelledImages):
    """The images of a data set.

    Args:
        source: the data set; ``source[row]`` is a mapping by column.
        column: the column with the images.
        spec, classes, size, pixels: as ``ImageFolder`` takes them.

    Raises:
        DataError: no column of classes, or what does not fit the program.
    """

    def __init__(
        self,
        source: Any,
        column: str,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
    ):
        label_of_images(spec, "data")
        reader = reader_for(spec, "data", size, pixels)
        others = [name for name in source.column_names if name != column]
        told = class_column(source, others)
        label = told or label_column([column, *others], None, "data")
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


def _undecoded(source: Any, column: str, feature: Any) -> Any:
    """Return a data set that gives the files of its images as they are, where it can: large ones are then decoded in part."""
    if feature is None or not hasattr(source, "cast_column"):
        return source
    try:
        return source.cast_column(column, type(feature)(decode=False))
    except TypeError:  # another class of this name
        return source
