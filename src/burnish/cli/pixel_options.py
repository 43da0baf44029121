"""Options that say what is done to the pixels of images, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup
from burnish.settings import read_number, split

if TYPE_CHECKING:
    from burnish.data import DataSpec
    from burnish.data.model_metadata import DataDescription


@dataclass(frozen=True)
class Pixels(OptionGroup):
    """What is done to the pixels of images and of arrays of bytes."""

    panel: ClassVar = "Pixels of images, and of arrays of bytes"
    pixels: Annotated[
        str | None,
        typer.Option(
            "--pixels",
            metavar="PRESET",
            help="What becomes of 0 to 255: unit (0 to 1), raw, -1..1, imagenet (as torchvision's models read them) or caffe; by "
            "default what the model's metadata says, else unit.",
            show_default=False,
        ),
    ] = None
    pixel_scale: Annotated[
        str | None, typer.Option("--pixel-scale", metavar="NUMBER", help="Multiply pixels, such as by 1/255.")
    ] = None
    pixel_mean: Annotated[
        str | None, typer.Option("--pixel-mean", metavar="NUMBERS", help="Then take off: one number, or 0.485,0.456,0.406.")
    ] = None
    pixel_std: Annotated[
        str | None, typer.Option("--pixel-std", metavar="NUMBERS", help="Then divide by: one number, or one for each channel.")
    ] = None
    interpolation: Annotated[
        str | None,
        typer.Option("--interpolation", help="How images are resized: nearest, bilinear, bicubic, box, hamming or lanczos."),
    ] = None
    resize: Annotated[
        str | None,
        typer.Option(
            "--resize",
            help="stretch to the model's size, or crop: resize the shorter side (crop:256; by default 8/7 of the size), and cut "
            "the size out of the centre.",
        ),
    ] = None
    channels: Annotated[str | None, typer.Option("--channels", help="Of the model's input: rgb, bgr or gray.")] = None
    layout: Annotated[str | None, typer.Option("--layout", help="NCHW or NHWC, where the model's input leaves it open.")] = None

    def settings(self) -> dict[str, Any] | None:
        """Return these options as ``burnish.data.open_dataset`` takes them; None where the command line names none.

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
    """Return a line on what a run does to pixels, and why; None where its data hold none."""
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
