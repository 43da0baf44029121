"""Opening of data of any format by a path or a short name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from burnish.data.batches import Batches
from burnish.data.data_spec import DataSpec, check_held
from burnish.data.dataset import ArrayDataset, Dataset, group_values
from burnish.data.formats import Opening, check_columns, check_group, check_pixels, check_sound, check_text, format_of, help_text
from burnish.data.huggingface import ColumnImages, columns_dataset, image_column, is_columnar, refuse_splits
from burnish.data.label_coding import are_lists, divided, several_labels, takes_several
from burnish.data.missing_values import Missing, check_missing
from burnish.data.preprocessing import PixelsLike
from burnish.data.sound.settings import SoundLike
from burnish.data.splitting import EvalSplit
from burnish.data.table import check_scaling, filled_inputs, rows_as_columns, table_dataset
from burnish.data.text.columns import TOKENS
from burnish.data.text.dataset import TextDataset
from burnish.data.text.settings import Text, TextLike, as_text
from burnish.errors import DataError
from burnish.program import Entry
from burnish.untrusted_files import read_in_time

Result = TypeVar("Result")
DataSource = Dataset | Batches | Iterable[Any] | str | Path | tuple[Any, Any] | Mapping[str, Any]


def open_dataset(
    source: str | Path,
    spec: DataSpec,
    *,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    image_size: tuple[int, int] | None = None,
    pixels: PixelsLike | None = None,
    text: TextLike | None = None,
    missing: Missing = "auto",
    split: EvalSplit | None = None,
    sound: SoundLike | None = None,
    label_separator: str | None = None,
    columns: str = "auto",
) -> Dataset:
    """Open data for a program.

    Args:
        source: ``digits``, ``digits:test``, or the path of a folder of images or ``.wav`` files, tar archives of images, an
            ``.npz`` file, an ``.npy`` file or a folder of them, or a ``.csv``, ``.tsv`` or ``.parquet`` file; with ``text`` one
            of these three, a ``.txt`` or a ``.jsonl`` file.
        spec: inputs of the program.
        label: label column of a table, or several columns of numbers or yes/no values with commas between them; or the label file
            of an ``.npy`` file.
        classes: class names by index, so that two datasets number them alike.
        image_size: height and width, if the model leaves them open.
        pixels: preprocessing of images and byte arrays: a preset, a ``Preprocessing``, or its settings; by default that of the
            model's metadata, else 0 to 255 become 0 to 1.
        text: tokenization: ``Text``, its settings by name, or the path of a ``tokenizer.json``; None for other data.
        missing: treatment of table rows with a missing value: ``error``; ``drop``, which counts them; ``mean``, ``median`` or
            ``most_frequent`` of the training data (for categories always the latter). ``auto`` fills as in training, with the
            median if columns are standardized, and else raises.
        split: part to hold out (``burnish.data.splitting``); its column of groups is not a feature.
        sound: preprocessing of sounds: settings by name, as text (``rate=16000,bands=64``), or a ``Sound``; by default that of
            the model's metadata, else from the input and the files.
        label_separator: text between a sample's labels in the label column, such as ``;``.
        columns: scaling of table numbers: ``standardize`` to mean 0 and standard deviation 1 of the training data, ``raw``, or
            ``auto``, which standardizes for untrained models (``burnish.models.create``).

    Raises:
        DataError: no data, an unknown format, or data that are damaged or do not fit the program; or ``pixels`` for data without
            pixels.
        ConfigurationError: invalid ``pixels``, ``text`` or ``missing``.
    """
    check_missing(missing)
    check_scaling(columns)
    how: dict[str, Any] = {"split": split, "sound": sound, "separator": label_separator, "columns": columns}
    asked = Opening(source, spec, label, classes, image_size, pixels, as_text(text), missing, **how)
    return read_data(source, _opened, asked)


def read_data(source: str | Path, read: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function that reads data, and turn its failures into DataError.

    Args:
        source: the data.
        read: function of the arguments.

    Raises:
        DataError: the data cannot be read, or reading takes too long.
    """
    try:
        path = Path(source)
        if not path.is_file():
            return read(*arguments)
        return read_in_time(str(source), path.stat().st_size, DataError, read, *arguments)
    except OSError as error:
        named = error.filename is not None and str(error.filename) != str(source)
        what = f"'{error.filename}': {error.strerror}" if named else error.strerror or str(error)
        raise DataError(
            f"{source}: cannot be read ({what}); choose data that you may read, or change their permissions"
        ) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{source}: damaged, or a name that no file has ({error!r}); write the data again") from error
    except MemoryError as error:
        what = str(error) or "there is not enough"
        raise DataError(f"{source}: the data do not fit into memory ({what}); give a part of them") from error


def _opened(asked: Opening) -> Dataset:
    form = format_of(asked.source)
    check_text(asked.source, form, asked.text)
    check_pixels(asked.source, form, asked.pixels)
    check_columns(asked.source, form, asked.separator, asked.columns)
    check_group(asked.source, form, asked.group)
    check_sound(asked.source, form, asked.sound)
    return form.open(asked)


def as_dataset(
    source: DataSource,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    pixels: PixelsLike | None = None,
    text: TextLike | None = None,
    split: EvalSplit | None = None,
    sound: SoundLike | None = None,
    label: str | None = None,
    label_separator: str | None = None,
    missing: Missing = "auto",
    columns: str = "auto",
) -> Dataset:
    """Return ``source`` if it is a dataset, or make one from it.

    Args:
        source: a dataset; a source for ``open_dataset``; ``(x, y)``, fitted to the program; arrays by input name, used unchanged;
            or a Hugging Face dataset of texts (with ``text``), tokens (``input_ids``) or features. With ``text`` also ``(texts,
            labels)``, columns by name, or texts.
        spec: inputs of the program.
        classes, pixels, text, split, sound, label, label_separator, missing, columns: see ``open_dataset``; not for datasets and
            arrays by input name.

    Raises:
        DataError: ``source`` is something else, unreadable or does not fit.
    """
    check_missing(missing)
    check_scaling(columns)
    how: dict[str, Any] = {"missing": missing, "columns": columns, "label_separator": label_separator}
    if isinstance(source, str | Path):
        how |= {"label": label, "classes": classes, "pixels": pixels, "text": text, "split": split, "sound": sound}
        return open_dataset(source, spec, **how)
    group = None if split is None else split.group
    text = as_text(text)
    of_table: dict[str, Any] = {"separator": label_separator, "missing": missing, "scaling": columns}
    refuse_splits(source)
    if is_columnar(source):
        return _of_columns(source, spec, classes, text, pixels, split, label, of_table)
    if text is not None and not isinstance(source, Dataset):
        return TextDataset(source, text, spec, label, classes, group=group, separator=label_separator)
    held = columns_in(source, spec)
    if held is not None:
        return table_dataset(held, spec, label, "data", classes, pixels=pixels, split=split, **of_table)
    if label is not None:
        raise DataError(f"data: label names the column of a table, and a {type(source).__name__} has none: leave it out")
    if isinstance(source, Mapping):
        for entry in (*spec.data, spec.label, *spec.further_labels):
            array = None if entry is None else source.get(entry.name)
            if entry is not None and isinstance(array, np.ndarray) and _is_cast(array, entry):
                check_held(array, entry, "data")
        groups = None if group is None else group_values(source.get(group), group, "data", ", ".join(map(repr, source)))
        arrays = {name: array for name, array in source.items() if name != group}
        return ArrayDataset(arrays, shared=spec.shared(arrays), groups=groups)
    if group is not None and isinstance(source, tuple | Dataset) and getattr(source, "groups", None) is None:
        raise DataError(
            f"eval_split='group:{group}': data of type {type(source).__name__} have no columns by name: give arrays by input "
            f"name, with '{group}' among them, or a share, such as 0.2"
        )
    if isinstance(source, tuple) and len(source) == 2:
        return _of_pair(source[0], source[1], spec, classes, pixels, label_separator)
    if isinstance(source, Dataset):
        return source
    raise DataError(
        f"no data set is made of a value of type {type(source).__name__}: give (x, y), arrays by input name, "
        f"an object with __len__ and batch(indices), or {help_text()}{_remedy(source)}"
    )


def _is_cast(array: np.ndarray, entry: Entry) -> bool:
    """True if a step will cast an array. Memory-mapped arrays are excluded: checking all of one would take too long."""
    kinds = "f" if entry.dtype.is_floating_point() else "iu"
    return array.ndim > 0 and array.dtype.kind in kinds and not isinstance(array, np.memmap)


def _remedy(source: object) -> str:
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, list | tuple):
        return "; of a data set of PyTorch give a Trainer its batches, torch.utils.data.DataLoader(data, batch_size=32)"
    return ""


def _of_columns(
    source: Any,
    spec: DataSpec,
    classes: Sequence[str] | None,
    text: Text | None,
    pixels: PixelsLike | None,
    split: EvalSplit | None,
    label: str | None,
    of_table: Mapping[str, Any],
) -> Dataset:
    group = None if split is None else split.group
    if text is not None or TOKENS in source.column_names:
        return TextDataset(source, text or Text(), spec, label, classes, group=group, separator=of_table["separator"])
    if (images := image_column(source)) is not None:
        if label is not None:
            raise DataError(f"data: label='{label}': of images the column with the classes is found by its name or its feature")
        return ColumnImages(source, images, spec, classes, pixels=pixels, group=group)
    return columns_dataset(source, spec, classes, pixels, split, label, of_table)


def _of_pair(
    features: Any,
    labels: Any,
    spec: DataSpec,
    classes: Sequence[str] | None,
    pixels: PixelsLike | None,
    separator: str | None,
) -> ArrayDataset:
    """Make a dataset of features and labels; lists of labels, or texts with a separator, become multi-hot labels."""
    held = labels if are_lists(labels) else np.asarray(labels)
    names: tuple[str, ...] | None = None
    if takes_several(spec.label):
        if isinstance(held, np.ndarray) and held.dtype.kind in "US" and separator is not None:
            held = divided(held.tolist(), separator)
        if are_lists(held):
            held, names = several_labels(held, "data", classes or spec.described.classes)
    elif are_lists(held):
        raise DataError(
            "data: the labels are lists, and the loss compares with one class, or value, of each sample: give one, or choose the "
            "loss bce_with_logits, for which several may be right at once"
        )
    array, table = np.asarray(features), spec.described.table
    columns = rows_as_columns(array, spec, "data")
    if columns is None:
        dataset = spec.dataset(array, np.asarray(held), "data", classes, pixels=pixels)
    else:
        filled, notes = filled_inputs(columns, spec, "data", table)
        note = f"data: {'; '.join(notes)}" if notes else None
        dataset = spec.dataset(filled, np.asarray(held), "data", classes, note, table=table)
    dataset.classes = names or dataset.classes
    return dataset


def columns_in(source: Any, spec: DataSpec | None = None) -> dict[str, np.ndarray] | None:
    """Return the columns of an in-memory table: a data frame, a structured array, or a mapping of columns.

    Args:
        source: the data.
        spec: inputs of the program, to recognize arrays by input name, which are not columns.

    Returns:
        Column name -> [rows]; None if the data are not a table.
    """
    if isinstance(source, np.ndarray) and source.dtype.names is not None:
        return {name: _column(source[name]) for name in source.dtype.names}
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):
        return {str(name): _column(source[name].to_numpy()) for name in source.columns}
    if not isinstance(source, Mapping) or not all(isinstance(name, str) for name in source):
        return None
    if len(source) < 2 or (spec is not None and _is_by_input(source, spec)):
        return None
    arrays = {name: values if are_lists(values) else np.asarray(values) for name, values in source.items()}
    lengths = {len(array) for array in arrays.values() if np.ndim(array) or isinstance(array, list)}
    is_table = len(lengths) == 1 and all(are_lists(array) or np.ndim(array) == 1 for array in arrays.values())
    return {name: _column(array) for name, array in arrays.items()} if is_table else None


def _is_by_input(source: Mapping[str, Any], spec: DataSpec) -> bool:
    """True if arrays are named after inputs. A 1-D array for an input with several values per sample is a column, however."""
    named = [entry for entry in spec.data if entry.name in source]
    if len(spec.data) != 1 or not named:
        return bool(named)
    (entry,) = named
    width = math.prod(extent for extent in entry.extents[1:] if isinstance(extent, int))
    return np.ndim(source[entry.name]) != 1 or width == 1


def _column(values: Any) -> np.ndarray:
    if are_lists(values):
        lists = np.empty(len(values), object)
        for row, labels in enumerate(values):
            lists[row] = [*labels]
        return lists
    array = np.asarray(values)
    if array.dtype == object and all(isinstance(value, str) for value in array.tolist()):
        return array.astype(str)
    return array
