"""Opening data by a short text or a path, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from burnish.data.annotated.coco import instance_files, open_coco
from burnish.data.annotated.masks import MaskImages, is_masks, is_of_positions
from burnish.data.annotated.voc import has_masks, is_voc, open_voc
from burnish.data.batches import Batches
from burnish.data.column_images import ColumnImages, image_column
from burnish.data.columns import columns_dataset, is_columnar, refuse_splits
from burnish.data.csv import LeftOut, read_csv
from burnish.data.data_spec import DataSpec, check_held
from burnish.data.dataset import ArrayDataset, Dataset
from burnish.data.digits import open_digits
from burnish.data.image_folder import ImageFolder
from burnish.data.mapped_arrays import MappedArrays
from burnish.data.missing import Columns, Missing, check_missing
from burnish.data.npz import open_npz
from burnish.data.parquet import read_parquet
from burnish.data.pixel_presets import PixelsLike
from burnish.data.table import table_dataset
from burnish.data.tar_shards import SEQUENCE, TarImages
from burnish.data.text.columns import TOKENS
from burnish.data.text.dataset import TextDataset
from burnish.data.text.settings import Text, TextLike, as_text
from burnish.errors import DataError
from burnish.program import Entry
from burnish.untrusted import check_regular, read_in_time

Result = TypeVar("Result")
DataSource = Dataset | Batches | Iterable[Any] | str | Path | tuple[Any, Any] | Mapping[str, Any]

Kind = Literal["digits", "npz", "npy", "images", "tar", "coco", "voc", "masks", "csv", "parquet", "txt", "jsonl"]

FILES: dict[str, Kind] = {
    ".npz": "npz",
    ".tar": "tar",
    ".json": "coco",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "txt",
    ".jsonl": "jsonl",
}
TEXT_ALONE = ("txt", "jsonl")
TEXTS = ("csv", "parquet", *TEXT_ALONE)

FORMATS = (
    "digits or digits:test (scikit-learn's images), an .npz file (x, y), a folder of images (one subfolder per class), "
    "tar archives of images (WebDataset), a COCO folder or .json file, a PASCAL VOC folder, a folder of 'images' and 'masks', "
    "a folder of .npy files, "
    "a .csv, .tsv or .parquet file; or, with a tokenizer, texts in one of these three, a .txt or a .jsonl file"
)


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
) -> Dataset:
    """Open data for a program.

    Args:
        source: ``digits``, ``digits:test``, or the path of an image folder, tar archives of images, an ``.npz`` file, a folder of
            ``.npy`` files, or a ``.csv``, ``.tsv`` or ``.parquet`` file; with ``text`` of one of these three, a ``.txt`` or a
            ``.jsonl`` file.
        spec: what the program takes.
        label: the label column of a table.
        classes: names of the classes in the order of their indices, so that two data sets number them alike.
        image_size: height and width of images, where the model leaves them open.
        pixels: what is done to the pixels of images and to arrays of bytes: a preset, a ``Preprocessing``, or its settings; by
            default what the model's metadata says, else 0 to 255 become 0 to 1.
        text: how texts become tokens: ``Text``, its settings by name, or the path of a ``tokenizer.json``; None for data that
            are no texts.
        missing: what becomes of a row of a table in which a value is missing: ``error``, or ``drop`` leaves it out and counts it.

    Raises:
        DataError: nothing there, an unknown format, damaged data, or data that do not fit the program; or pixels are asked for,
            and the data hold none.
        ConfigurationError: no such pixels, settings of texts, or ``missing``.
    """
    check_missing(missing)
    return read_data(source, _opened, source, spec, label, classes, image_size, pixels, as_text(text), missing)


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


def _opened(
    source: str | Path,
    spec: DataSpec,
    label: str | None,
    classes: Sequence[str] | None,
    image_size: tuple[int, int] | None,
    pixels: PixelsLike | None,
    text: Text | None,
    missing: Missing,
) -> Dataset:
    kind, path = data_kind(source), Path(source)
    check_text(source, kind, text)
    if text is not None:
        refuse_pixels(source, kind, pixels)
        return TextDataset(path, text, spec, label, classes)
    if kind == "images":
        return ImageFolder(path, spec, classes, image_size, pixels)
    if kind == "tar":
        return TarImages(source, spec, classes, image_size, pixels)
    if kind == "npy":
        return MappedArrays(path, spec, classes, pixels)
    if kind == "coco":
        return open_coco(path, spec, classes, image_size, pixels)
    if kind == "masks" or (kind == "voc" and has_masks(path) and is_of_positions(spec)):
        return MaskImages(path, spec, image_size, pixels)
    if kind == "voc":
        return open_voc(path, spec, classes, image_size, pixels)
    if kind == "npz":
        return open_npz(path, spec, classes, pixels)
    refuse_pixels(source, kind, pixels)
    if kind == "digits":
        return open_digits(spec, "test" if str(source) == "digits:test" else "train")
    columns, notes = read_table(path, missing)
    return table_dataset(columns, spec, label, str(path), classes, notes)


def read_table(path: Path, missing: Missing = "error", left_out: LeftOut = lambda names: ()) -> tuple[Columns, list[str]]:
    """Return the columns of a ``.csv`` or ``.parquet`` file by name, and notes on its rows.

    Args:
        path: the file.
        missing: what becomes of a row in which a value is missing.
        left_out: which columns are not read, by the names of all.

    Raises:
        DataError: as ``read_csv`` and ``read_parquet``.
    """
    return (read_csv if data_kind(path) == "csv" else read_parquet)(path, missing, left_out)


def check_text(source: str | Path, kind: Kind, text: Text | None) -> None:
    """Raise DataError where data hold texts and nothing says what becomes of them, or hold none and something does."""
    if text is None and kind in TEXT_ALONE:
        raise DataError(f"{source}: texts become tokens by a tokenizer: name one (text=..., --tokenizer tokenizer.json)")
    if text is not None and kind not in TEXTS:
        raise DataError(f"{source}: a tokenizer makes tokens of texts, and these data hold none: leave it out")


def refuse_pixels(source: str | Path, kind: Kind, pixels: PixelsLike | None) -> None:
    """Raise DataError where something is to be done to the pixels of data that hold none."""
    if pixels is not None:
        what = "digits are divided by 16 already" if kind == "digits" else "a table holds numbers, which are taken as they are"
        raise DataError(f"{source}: {what}; pixels says what is done to images and to arrays of bytes (uint8): leave it out")


def data_kind(source: str | Path) -> Kind:
    """Return what kind of data a text or a path stands for.

    Raises:
        DataError: nothing there, or an unknown format.
    """
    if str(source) in ("digits", "digits:train", "digits:test"):
        return "digits"
    path = Path(source)
    if path.suffix.lower() == ".tar" and SEQUENCE.search(str(source)):
        return "tar"
    if not path.exists():
        raise DataError(f"{source}: no such file or folder; data are {FORMATS}")
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(f"{source}: {error}") from error
    if is_voc(path):
        return "voc"
    if path.is_dir():
        if is_masks(path):
            return "masks"
        held = {child.suffix.lower() for child in path.iterdir() if child.is_file()}
        return "tar" if ".tar" in held else "npy" if ".npy" in held else "coco" if instance_files(path) else "images"
    kind = FILES.get(path.suffix.lower())
    if kind is None:
        raise DataError(f"{source}: burnish does not read '{path.suffix.lower() or path.name}' files; data are {FORMATS}")
    return kind


def as_dataset(
    source: DataSource,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    pixels: PixelsLike | None = None,
    text: Text | None = None,
) -> Dataset:
    """Return a data set as it is, or make one.

    Args:
        source: a data set; what ``open_dataset`` takes; ``(x, y)``, fitted to the program; arrays by input name, which are taken
            as they are; or one of Hugging Face ``datasets``, whose columns are texts (with ``text``), tokens (``input_ids``), or
            features. With ``text`` also ``(texts, labels)``, columns by name, or texts.
        spec: what the program takes.
        classes, pixels, text: as in ``open_dataset``; data sets and arrays by input name are as they are, whatever ``pixels``.

    Raises:
        DataError: something else, or what cannot be read or does not fit.
    """
    if isinstance(source, str | Path):
        return open_dataset(source, spec, classes=classes, pixels=pixels, text=text)
    refuse_splits(source)
    if is_columnar(source):
        return _of_columns(source, spec, classes, text, pixels)
    if text is not None and not isinstance(source, Dataset):
        return TextDataset(source, text, spec, classes=classes)
    if isinstance(source, Mapping):
        for entry in (*spec.data, spec.label, *spec.further_labels):
            array = None if entry is None else source.get(entry.name)
            if entry is not None and isinstance(array, np.ndarray) and _is_cast(array, entry):
                check_held(array, entry, "data")
        return ArrayDataset(source, shared=spec.shared(source))
    if isinstance(source, tuple) and len(source) == 2:
        return spec.dataset(np.asarray(source[0]), np.asarray(source[1]), "data", classes, pixels=pixels)
    if isinstance(source, Dataset):
        return source
    raise DataError(
        f"no data set is made of a value of type {type(source).__name__}: give (x, y), arrays by input name, "
        f"an object with __len__ and batch(indices), or {FORMATS}{_remedy(source)}"
    )


def _is_cast(array: np.ndarray, entry: Entry) -> bool:
    """Whether a step casts an array. One in a mapped file is left to it: to read all of that takes too long."""
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
    source: Any, spec: DataSpec, classes: Sequence[str] | None, text: Text | None, pixels: PixelsLike | None
) -> Dataset:
    """Make a data set of one of Hugging Face."""
    if text is not None or TOKENS in source.column_names:
        return TextDataset(source, text or Text(), spec, classes=classes)
    if (images := image_column(source)) is not None:
        return ColumnImages(source, images, spec, classes, pixels=pixels)
    return columns_dataset(source, spec, classes, pixels)
