"""Options for reading data: labels, pixels of images, tokens of texts; and checks that they fit the data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup
from burnish.data.text.settings import Text
from burnish.settings import is_natural_text, read_number, split
from burnish.training.trainer_options import SoundOptions

if TYPE_CHECKING:
    from burnish.data import DataDescription, DataSpec


def check_data_options(
    *sources: str | None,
    label: str | None = None,
    image_size: tuple[int, int] | None = None,
    pixels: str | None = None,
    missing: str | None = None,
    columns: str = "auto",
) -> None:
    """Reject options without a meaning for any of the data.

    Args:
        sources: training and evaluation data, as in ``burnish.data.open_dataset``, or None.
        label: value of ``--label``.
        image_size: value of ``--image-size``.
        pixels: first of the pixel options that was given.
        missing: value of ``--missing``.
        columns: value of ``--columns``.

    Raises:
        DataError: the data do not exist.
        typer.BadParameter: an option has no meaning; the message names it, the data, and its purpose.
    """
    from burnish.data.missing_values import AUTO, ERROR, check_missing
    from burnish.data.table import check_scaling

    check_missing(missing or AUTO)
    check_scaling(columns)
    settles = missing not in (None, AUTO, ERROR)
    if label is None and image_size is None and pixels is None and not settles and columns == AUTO:
        return
    from burnish.data.formats import format_of

    forms = {format_of(source): source for source in sources if source is not None}
    if not forms:
        raise typer.BadParameter(
            f"--label {label} names the column of a table that holds the labels, and no data are given: leave it out, or give "
            "--data"
        )
    form, source = next(iter(forms.items()))
    held = {each.holds for each in forms}
    has_columns = any(not each.labels for each in forms)
    if label is not None and not has_columns:
        raise typer.BadParameter(
            f"--label {label} names the column of a table (.csv, .parquet) that holds the labels, and '{source}' is "
            f"{form.short}, {form.labels}: leave it out"
        )
    if settles and not has_columns and not any(each.name == "jsonl" for each in forms):
        raise typer.BadParameter(
            f"--missing {missing} is for rows of a table (.csv, .parquet), and '{source}' is {form.short}: leave it out"
        )
    if columns != AUTO and not has_columns:
        raise typer.BadParameter(
            f"--columns {columns} is for a table (.csv, .parquet), and '{source}' is {form.short}: leave it out"
        )
    if image_size is not None and "images" not in held:
        raise typer.BadParameter(
            f"--image-size is what the files in a folder of images are resized to, and '{source}' is {form.short}, whose "
            "samples have a shape already: leave it out"
        )
    if pixels is not None and not held & {"images", "arrays"}:
        raise typer.BadParameter(
            f"{pixels} says what is done to the pixels of images and of arrays of bytes, and '{source}' is {form.short}, whose "
            "numbers are taken as they are: leave it out"
        )


def read_extents(texts: list[str]) -> dict[str, int]:
    """Return {name: extent} from ``NAME=N``.

    Raises:
        typer.BadParameter: a text has another form.
    """
    extents = {}
    for text in split(texts):
        name, _, size = text.partition("=")
        if not name or not is_natural_text(size) or int(size) < 1:
            raise typer.BadParameter(f"--extent {text}: give NAME=N, such as sequence=16")
        extents[name] = int(size)
    return extents


@dataclass(frozen=True)
class Pixels(OptionGroup):
    """The preprocessing of pixels, for images and byte arrays."""

    panel: ClassVar = "Pixels of images, and of arrays of bytes"
    pixels: Annotated[
        str | None,
        typer.Option(
            "--pixels",
            metavar="PRESET",
            help="Scaling of pixels: unit (0 to 1), raw, -1..1, imagenet (as torchvision) or caffe.",
            show_default="as the model says, else unit",
        ),
    ] = None
    pixel_scale: Annotated[
        str | None,
        typer.Option("--pixel-scale", metavar="NUMBER", help="Factor of pixels, such as 1/255.", show_default="that of --pixels"),
    ] = None
    pixel_mean: Annotated[
        str | None,
        typer.Option(
            "--pixel-mean",
            metavar="NUMBERS",
            help="Mean to subtract after scaling: one number, or 0.485,0.456,0.406.",
            show_default="that of --pixels",
        ),
    ] = None
    pixel_std: Annotated[
        str | None,
        typer.Option(
            "--pixel-std",
            metavar="NUMBERS",
            help="Deviation to divide by after that: one number, or one for each channel.",
            show_default="that of --pixels",
        ),
    ] = None
    interpolation: Annotated[
        str | None,
        typer.Option(
            "--interpolation",
            help="Resizing of images: nearest, bilinear, bicubic, box, hamming or lanczos.",
            show_default="as the model says, else bilinear",
        ),
    ] = None
    resize: Annotated[
        str | None,
        typer.Option(
            "--resize",
            help="Fit to the model's size: stretch, or crop (crop:256 resizes the shorter side first).",
            show_default="as the model says, else stretch",
        ),
    ] = None
    channels: Annotated[
        str | None,
        typer.Option("--channels", help="Channels of the model's input: rgb, bgr or gray.", show_default="as the model says"),
    ] = None
    layout: Annotated[
        str | None, typer.Option("--layout", help="Layout of the model's input: NCHW or NHWC.", show_default="as the model says")
    ] = None

    def settings(self) -> dict[str, Any] | None:
        """Return these options for ``burnish.data.open_dataset``; None if none is given.

        Raises:
            typer.BadParameter: a text is not a number.
        """
        if self.first_named is None:
            return None
        resize, _, side = (self.resize or "").partition(":")
        settings = {
            "preset": self.pixels,
            "scale": None if self.pixel_scale is None else _number("--pixel-scale", self.pixel_scale),
            "mean": _numbers("--pixel-mean", self.pixel_mean),
            "std": _numbers("--pixel-std", self.pixel_std),
            "interpolation": self.interpolation,
            "resize": resize or None,
            "channels": self.channels,
            "layout": self.layout,
        }
        asked: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if resize:
            asked["shorter_side"] = int(_number("--resize", side)) if side else None
        return asked


def pixels_line(described: DataDescription, spec: DataSpec, pixels: Pixels) -> str | None:
    """Return a line on the preprocessing of pixels, with its reason; None if the data have none."""
    done = described.preprocessing
    if done is None:
        return None
    reason = ""
    if spec.described.preprocessing is not None and pixels.pixels is None:
        reason = (
            " (as recorded with the model)"
            if pixels.first_named is None
            else " (as recorded with the model, but for the options)"
        )
    elif pixels.first_named is None:
        reason = " (--pixels for another, such as imagenet)"
    return f"pixels: {done.text()}{reason}"


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(_number(option, part) for part in split([text]))


def _number(option: str, text: str) -> float:
    """Read ``0.5`` or ``1/255``."""
    numerator, slash, denominator = text.partition("/")
    try:
        return read_number(numerator) / (read_number(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{option} {text}: give a number, such as 0.5 or 1/255") from None


@dataclass(frozen=True)
class Sounds(OptionGroup, SoundOptions):
    """The preprocessing of sounds."""

    panel: ClassVar = "Sounds"


@dataclass(frozen=True)
class TextOptions(OptionGroup, Text):
    """The tokenization of texts."""

    panel: ClassVar = "Texts"

    def settings(self) -> Text | None:
        """Return these options for ``burnish.data.open_dataset``; None if none is given."""
        if self.first_named is None:
            return None
        return Text(**{field.name: getattr(self, field.name) for field in fields(Text)})

    def settings_for(self, model: Path, data: str, described: DataDescription) -> Text | None:
        """Return the tokenization for a trained model, from its description of texts and the tokenizer in its run.

        Args:
            model: a run, or a file in its folder.
            data: data to read.
            described: the model's description of its training data.
        """
        from burnish.training.trained_model import text_of_model

        return text_of_model(self.settings(), described.text, model, data)
