"""Opening data by a short text or a path, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from burnish.data.batches import Batches
from burnish.data.data_spec import DataSpec, check_held
from burnish.data.dataset import ArrayDataset, Dataset, group_values
from burnish.data.formats import Opening, check_group, check_pixels, check_sound, check_text, format_of, help_text
from burnish.data.huggingface import ColumnImages, columns_dataset, image_column, is_columnar, refuse_splits
from burnish.data.missing_values import Missing, check_missing
from burnish.data.preprocessing import PixelsLike
from burnish.data.sound.settings import SoundLike
from burnish.data.splitting import EvalSplit
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
    missing: Missing = "error",
    split: EvalSplit | None = None,
    sound: SoundLike | None = None,
) -> Dataset:
    """Open data for a program.

    Args:
        source: ``digits``, ``digits:test``, or the path of a folder of images or of ``.wav`` files, tar archives of images, an
            ``.npz`` file, a folder of ``.npy`` files or one of them, or a ``.csv``, ``.tsv`` or ``.parquet`` file; with ``text``
            of one of these three, a ``.txt`` or a ``.jsonl`` file.
        spec: what the program takes.
        label: the label column of a table, or the file with the labels of an ``.npy`` file.
        classes: names of the classes in the order of their indices, so that two data sets number them alike.
        image_size: height and width of images, where the model leaves them open.
        pixels: what is done to the pixels of images and to arrays of bytes: a preset, a ``Preprocessing``, or its settings; by
            default what the model's metadata says, else 0 to 255 become 0 to 1.
        text: how texts become tokens: ``Text``, its settings by name, or the path of a ``tokenizer.json``; None for data that
            are no texts.
        missing: what becomes of a row of a table in which a value is missing: ``error``, or ``drop`` leaves it out and counts it.
        split: what is to be held out of the data (``burnish.data.splitting``); a column or an array of groups is no feature.
        sound: what is done to sounds: settings by name, their text (``rate=16000,bands=64``), or a ``Sound``; by default what the
            model's metadata says, else what its input and the files say.

    Raises:
        DataError: nothing there, an unknown format, damaged data, or data that do not fit the program; or pixels are asked for,
            and the data hold none.
        ConfigurationError: no such pixels, settings of texts, or ``missing``.
    """
    check_missing(missing)
    asked = Opening(source, spec, label, classes, image_size, pixels, as_text(text), missing, split, sound)
    return read_data(source, _opened, asked)


def read_data(source: str | Path, read: Callable[..., Result], *arguments: Any) -> Result:
    """Return what reading data gives.

    Args:
        source: the data.
        read: takes the arguments.

    Raises:
        DataError: what the system or a library says of data that cannot be read; or reading a file takes too long.
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
) -> Dataset:
    """Return a data set as it is, or make one.

    Args:
        source: a data set; what ``open_dataset`` takes; ``(x, y)``, fitted to the program; arrays by input name, which are taken
            as they are; or one of Hugging Face ``datasets``, whose columns are texts (with ``text``), tokens (``input_ids``), or
            features. With ``text`` also ``(texts, labels)``, columns by name, or texts.
        spec: what the program takes.
        classes, pixels, text, split, sound: as in ``open_dataset``; data sets and arrays by input name are as they are, whatever
            ``pixels``.

    Raises:
        DataError: something else, or what cannot be read or does not fit.
    """
    if isinstance(source, str | Path):
        return open_dataset(source, spec, classes=classes, pixels=pixels, text=text, split=split, sound=sound)
    group = None if split is None else split.group
    text = as_text(text)
    refuse_splits(source)
    if is_columnar(source):
        return _of_columns(source, spec, classes, text, pixels, split)
    if text is not None and not isinstance(source, Dataset):
        return TextDataset(source, text, spec, classes=classes, group=group)
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
        return spec.dataset(np.asarray(source[0]), np.asarray(source[1]), "data", classes, pixels=pixels)
    if isinstance(source, Dataset):
        return source
    raise DataError(
        f"no data set is made of a value of type {type(source).__name__}: give (x, y), arrays by input name, "
        f"an object with __len__ and batch(indices), or {help_text()}{_remedy(source)}"
    )


def _is_cast(array: np.ndarray, entry: Entry) -> bool:
    """Return whether a step casts an array. One in a mapped file is left to it: to read all of that takes too long."""
    kinds = "f" if entry.dtype.is_floating_point() else "iu"
    return array.ndim > 0 and array.dtype.kind in kinds and not isinstance(array, np.memmap)


def _remedy(source: object) -> str:
    """What makes data of what other libraries call so, for an error; nothing where that is not known."""
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):
        return (
            "; of a data frame give its columns of numbers and of labels, (data[['a', 'b']].to_numpy(), data['label'].to_numpy())"
        )
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
) -> Dataset:
    """Make a data set of one of Hugging Face."""
    group = None if split is None else split.group
    if text is not None or TOKENS in source.column_names:
        return TextDataset(source, text or Text(), spec, classes=classes, group=group)
    if (images := image_column(source)) is not None:
        return ColumnImages(source, images, spec, classes, pixels=pixels, group=group)
    return columns_dataset(source, spec, classes, pixels, split)
