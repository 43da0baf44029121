"""The table of data formats: how each one is recognized and opened. Help and error messages list it.

The command imports this module for its help, so each format imports its dependencies only when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from burnish.errors import DataError
from burnish.settings import suggestion
from burnish.untrusted_files import check_regular

if TYPE_CHECKING:
    from burnish.data.csv import LeftOut
    from burnish.data.data_spec import DataSpec
    from burnish.data.dataset import Dataset
    from burnish.data.missing_values import Columns, Missing
    from burnish.data.preprocessing import PixelsLike
    from burnish.data.sound.settings import SoundLike
    from burnish.data.splitting import EvalSplit
    from burnish.data.text.settings import Text

DIGITS = ("digits", "digits:train", "digits:test")


@dataclass(frozen=True)
class Opening:
    """Data to open, with the arguments of ``open_dataset``."""

    source: str | Path
    spec: DataSpec
    label: str | None
    classes: Sequence[str] | None
    image_size: tuple[int, int] | None
    pixels: PixelsLike | None
    text: Text | None
    missing: Missing
    split: EvalSplit | None = None
    sound: SoundLike | None = None
    separator: str | None = None
    columns: str = "auto"

    @property
    def group(self) -> str | None:
        """The column of groups."""
        return None if self.split is None else self.split.group

    @property
    def path(self) -> Path:
        return Path(self.source)


@dataclass(frozen=True)
class Format:
    """A data format.

    Attributes:
        name: short name.
        said: description in help and errors.
        holds: ``images``, ``arrays`` (bytes are pixels), ``table`` (numbers, or texts with a tokenizer), ``texts``, ``digits`` or
            ``sounds``.
        labels: location of the labels, to reject an option that names it; empty if the option applies.
        open: opens the data.
        suffixes: lowercase file suffixes.
        is_it: predicate on an existing path and the suffixes in a folder; by default the suffix decides.
    """

    name: str
    said: str
    holds: Literal["images", "arrays", "table", "texts", "digits", "sounds"]
    labels: str
    open: Callable[[Opening], Dataset]
    suffixes: tuple[str, ...] = ()
    is_it: Callable[[Path, frozenset[str]], bool] | None = None

    @property
    def short(self) -> str:
        """The description without its part in parentheses."""
        return self.said.partition(" (")[0]

    def matches(self, path: Path, held: frozenset[str]) -> bool:
        """True if an existing path has this format."""
        is_file = not path.is_dir() and path.suffix.lower() in self.suffixes
        return is_file or (self.is_it is not None and self.is_it(path, held))


def _open_digits(asked: Opening) -> Dataset:
    from burnish.data.digits import open_digits

    return open_digits(asked.spec, "test" if str(asked.source) == "digits:test" else "train")


def _open_npz(asked: Opening) -> Dataset:
    from burnish.data.numpy_files import open_npz

    return open_npz(asked.path, asked.spec, asked.classes, asked.pixels, asked.group)


def _open_npy(asked: Opening) -> Dataset:
    from burnish.data.numpy_files import MappedArrays

    return MappedArrays(asked.path, asked.spec, asked.classes, asked.pixels, asked.group, asked.label)


def _open_voc(asked: Opening) -> Dataset:
    from burnish.data.annotated.masks import is_of_positions
    from burnish.data.annotated.voc import has_masks, open_voc

    if has_masks(asked.path) and is_of_positions(asked.spec):
        return _open_masks(asked)
    return open_voc(asked.path, asked.spec, asked.classes, asked.image_size, asked.pixels)


def _is_voc(path: Path, held: frozenset[str]) -> bool:
    from burnish.data.annotated.voc import is_voc

    return is_voc(path)


def _open_masks(asked: Opening) -> Dataset:
    from burnish.data.annotated.masks import MaskImages

    return MaskImages(asked.path, asked.spec, asked.image_size, asked.pixels)


def _is_masks(path: Path, held: frozenset[str]) -> bool:
    from burnish.data.annotated.masks import is_masks

    return path.is_dir() and is_masks(path)


def _open_tar(asked: Opening) -> Dataset:
    from burnish.data.tar_shards import TarImages

    return TarImages(asked.source, asked.spec, asked.classes, asked.image_size, asked.pixels)


def _open_coco(asked: Opening) -> Dataset:
    from burnish.data.annotated.coco import open_coco

    return open_coco(asked.path, asked.spec, asked.classes, asked.image_size, asked.pixels)


def _is_coco(path: Path, held: frozenset[str]) -> bool:
    from burnish.data.annotated.coco import instance_files

    return path.is_dir() and bool(instance_files(path))


def _open_images(asked: Opening) -> Dataset:
    from burnish.data.image_folder import ImageFolder

    return ImageFolder(asked.path, asked.spec, asked.classes, asked.image_size, asked.pixels)


def _open_sounds(asked: Opening) -> Dataset:
    from burnish.data.sound.dataset import SoundFolder

    return SoundFolder(asked.path, asked.spec, asked.classes, asked.sound)


def _is_sounds(path: Path, held: frozenset[str]) -> bool:
    from burnish.data.sound.dataset import is_sounds

    return is_sounds(path)


def _open_table(asked: Opening) -> Dataset:
    from burnish.data.missing_values import KEPT
    from burnish.data.table import table_dataset

    if asked.text is not None:
        return _open_texts(asked)
    columns, notes = read_table(asked.path, KEPT)
    how: dict[str, Any] = {"separator": asked.separator, "missing": asked.missing, "scaling": asked.columns}
    how["split"] = asked.split
    return table_dataset(columns, asked.spec, asked.label, str(asked.path), asked.classes, notes, **how)


def _open_texts(asked: Opening) -> Dataset:
    from burnish.data.text.dataset import TextDataset

    assert asked.text is not None
    how: dict[str, Any] = {"group": asked.group, "separator": asked.separator}
    return TextDataset(asked.path, asked.text, asked.spec, asked.label, asked.classes, **how)


FORMATS = (
    Format("digits", "digits or digits:test (scikit-learn's images)", "digits", "which know theirs", _open_digits),
    Format(
        "npz",
        "an .npz file (x, y)",
        "arrays",
        "whose labels are the array y, or that of the loss's input",
        _open_npz,
        suffixes=(".npz",),
    ),
    Format("voc", "a PASCAL VOC folder", "images", "which has its annotations", _open_voc, is_it=_is_voc),
    Format("masks", "a folder of 'images' and 'masks'", "images", "whose labels are the masks", _open_masks, is_it=_is_masks),
    Format(
        "tar",
        "tar archives of images (WebDataset)",
        "images",
        "whose classes are in files beside them",
        _open_tar,
        suffixes=(".tar",),
        is_it=lambda path, held: ".tar" in held,
    ),
    Format(
        "npy",
        "a folder of .npy files",
        "arrays",
        "whose labels are y.npy, or that of the loss's input",
        _open_npy,
        is_it=lambda path, held: ".npy" in held,
    ),
    Format("array", "an .npy file (its labels in another, --label y.npy)", "arrays", "", _open_npy, suffixes=(".npy",)),
    Format(
        "coco",
        "a COCO folder or .json file",
        "images",
        "which has its annotations",
        _open_coco,
        suffixes=(".json",),
        is_it=_is_coco,
    ),
    Format(
        "sounds",
        "a folder of .wav files (one subfolder per class)",
        "sounds",
        "whose classes are its subfolders",
        _open_sounds,
        is_it=_is_sounds,
    ),
    Format(
        "images",
        "a folder of images (one subfolder per class)",
        "images",
        "whose classes are its subfolders",
        _open_images,
        is_it=lambda path, held: path.is_dir(),
    ),
    Format("csv", "a .csv file (or .tsv)", "table", "", _open_table, suffixes=(".csv", ".tsv")),
    Format("parquet", "a .parquet file", "table", "", _open_table, suffixes=(".parquet",)),
    Format("txt", "a .txt file", "texts", "whose labels come before a tab in each line", _open_texts, suffixes=(".txt",)),
    Format("jsonl", "a .jsonl file", "texts", "", _open_texts, suffixes=(".jsonl",)),
)
"""In the order of recognition: VOC before other folders, and a folder of images last."""


def help_text() -> str:
    """Return the description of all data formats."""
    others = ", ".join(each.said for each in FORMATS if each.holds != "texts")
    texts = " or ".join(each.said for each in FORMATS if each.holds == "texts")
    return f"{others}; or, with a tokenizer, texts in a .csv, .tsv or .parquet file, {texts}"


def format_of(source: str | Path) -> Format:
    """Return the format of a path or a name such as ``digits``.

    Raises:
        DataError: there is no such file or folder, or its format is unknown.
    """
    from burnish.data.tar_shards import SEQUENCE

    named = {each.name: each for each in FORMATS}
    if str(source) in DIGITS:
        return named["digits"]
    path = Path(source)
    if path.suffix.lower() == ".tar" and SEQUENCE.search(str(source)):
        return named["tar"]
    if not path.exists():
        raise DataError(
            f"{source}: no such file or folder{suggestion(str(source), DIGITS)}; check the path. Data are {help_text()}"
        )
    try:
        check_regular(path)
    except OSError as error:
        raise DataError(f"{source}: {error}") from error
    held = frozenset(child.suffix.lower() for child in path.iterdir() if child.is_file()) if path.is_dir() else frozenset()
    found = next((each for each in FORMATS if each.matches(path, held)), None)
    if found is None:
        kind = f"'{path.suffix.lower()}' files" if path.suffix else "files without a suffix"
        raise DataError(f"{source}: burnish does not read {kind}; give data in another form. Data are {help_text()}")
    return found


def read_table(path: Path, missing: Missing = "error", left_out: LeftOut | None = None) -> tuple[Columns, list[str]]:
    """Return the columns of a table file by name, and notes on its rows.

    Args:
        path: the file.
        missing: treatment of rows with a missing value.
        left_out: function from all column names to those that are not read.

    Raises:
        DataError: see ``read_csv`` and ``read_parquet``.
    """
    from burnish.data.csv import read_csv
    from burnish.data.parquet import read_parquet

    return (read_csv if format_of(path).name == "csv" else read_parquet)(path, missing, left_out or (lambda names: ()))


def check_text(source: str | Path, form: Format, text: Text | None) -> None:
    """Raise DataError for texts without a tokenizer, or a tokenizer without texts."""
    if text is None and form.holds == "texts":
        raise DataError(f"{source}: texts become tokens by a tokenizer: name one (text=..., --tokenizer tokenizer.json)")
    if text is not None and form.holds not in ("table", "texts"):
        raise DataError(f"{source}: a tokenizer makes tokens of texts, and these data hold none: leave it out")


def check_group(source: str | Path, form: Format, group: str | None) -> None:
    """Raise DataError if groups are requested for data without columns."""
    if group is not None and (form.holds not in ("arrays", "table", "texts") or form.name in ("txt", "array")):
        raise DataError(
            f"{source}: {form.short} has no columns, and a group is the value of one (eval_split='group:{group}'): give a share, "
            "such as 0.2, or the part to evaluate on as eval_data (--eval-data)"
        )


def check_sound(source: str | Path, form: Format, sound: SoundLike | None) -> None:
    """Raise DataError if sound settings are given for data without sounds."""
    if sound is not None and form.holds != "sounds":
        raise DataError(
            f"{source}: {form.short} holds no sounds, and sound (--sound) says what is done to .wav files: leave it out"
        )


def check_columns(source: str | Path, form: Format, separator: str | None, columns: str) -> None:
    """Raise DataError if a table option is given for other data."""
    if separator is not None and form.holds not in ("table", "texts"):
        raise DataError(
            f"{source}: label_separator (--label-separator) divides the texts in the label column of a table, and these are "
            f"{form.holds}: leave it out"
        )
    if columns != "auto" and form.holds != "table":
        raise DataError(
            f"{source}: columns='{columns}' (--columns) is for the columns of a table, and these are {form.holds}: leave it out"
        )


def check_pixels(source: str | Path, form: Format, pixels: PixelsLike | None) -> None:
    """Raise DataError if pixel settings are given for data without pixels."""
    if pixels is not None and form.holds not in ("images", "arrays"):
        what = {"digits": "digits are divided by 16 already", "sounds": "sounds have none (sound=..., --sound)"}.get(
            form.holds, "a table holds numbers, which are taken as they are"
        )
        raise DataError(f"{source}: {what}; pixels says what is done to images and to arrays of bytes (uint8): leave it out")
