"""Options that say what is done to the pixels of images, and what they come to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burnish.cli.console import split

if TYPE_CHECKING:
    from burnish.data import Wanted
    from burnish.data.model_metadata import DataDescription

PIXELS = "Pixels of images, and of arrays of bytes"

PresetOption = Annotated[
    str | None,
    typer.Option(
        "--pixels",
        metavar="PRESET",
        help="What becomes of 0 to 255: unit (0 to 1), raw, -1..1, imagenet (as torchvision's models read them) or caffe; by "
        "default what the model's metadata says, else unit.",
        show_default=False,
        rich_help_panel=PIXELS,
    ),
]
ScaleOption = Annotated[
    str | None,
    typer.Option("--pixel-scale", metavar="NUMBER", help="Multiply pixels, such as by 1/255.", rich_help_panel=PIXELS),
]
MeanOption = Annotated[
    str | None,
    typer.Option(
        "--pixel-mean", metavar="NUMBERS", help="Then take off: one number, or 0.485,0.456,0.406.", rich_help_panel=PIXELS
    ),
]
DeviationOption = Annotated[
    str | None,
    typer.Option(
        "--pixel-std", metavar="NUMBERS", help="Then divide by: one number, or one for each channel.", rich_help_panel=PIXELS
    ),
]
InterpolationOption = Annotated[
    str | None,
    typer.Option(
        "--interpolation",
        help="How images are resized: nearest, bilinear, bicubic, box, hamming or lanczos.",
        rich_help_panel=PIXELS,
    ),
]
ResizeOption = Annotated[
    str | None,
    typer.Option(
        "--resize",
        help="stretch to the model's size, or crop: resize the shorter side (crop:256; by default 8/7 of the size), and cut the "
        "size out of the centre.",
        rich_help_panel=PIXELS,
    ),
]
ChannelsOption = Annotated[
    str | None, typer.Option("--channels", help="Of the model's input: rgb, bgr or gray.", rich_help_panel=PIXELS)
]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", help="NCHW or NHWC, where the model's input leaves it open.", rich_help_panel=PIXELS),
]


@dataclass(frozen=True)
class Pixels:
    """What is done to pixels, as the command line says it: an option for each field, by ``takes_pixels``."""

    pixels: PresetOption = None
    pixel_scale: ScaleOption = None
    pixel_mean: MeanOption = None
    pixel_std: DeviationOption = None
    interpolation: InterpolationOption = None
    resize: ResizeOption = None
    channels: ChannelsOption = None
    layout: LayoutOption = None

    @property
    def first(self) -> str | None:
        """The first of these options that was given, as it is written; None where none was."""
        given = (field.name for field in fields(self) if getattr(self, field.name) is not None)
        name = next(given, None)
        return None if name is None else f"--{name.replace('_', '-')}"

    def settings(self) -> dict[str, Any] | None:
        """Return what was asked for, as ``burnish.data.open_dataset`` takes it; None where nothing was.

        Raises:
            typer.BadParameter: what is no number.
        """
        if self.first is None:
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


def pixels_line(described: DataDescription, wanted: Wanted, pixels: Pixels) -> str | None:
    """Return what a run says of what it does to pixels, and why; None where its data hold none."""
    done = described.preprocessing
    if done is None:
        return None
    reason = ""
    if wanted.described.preprocessing is not None and pixels.pixels is None:
        reason = " (as recorded with the model)" if pixels.first is None else " (as recorded with the model, but for the options)"
    elif pixels.first is None:
        reason = " (--pixels for another, such as imagenet)"
    return f"pixels: {done.text()}{reason}"


def takes_pixels(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command options in the place of its parameter ``pixels``: the fields of ``Pixels``."""
    options = inspect.signature(Pixels, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        parameters += options.values() if name == "pixels" else [parameter]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        chosen: Mapping[str, Any] = {name: given.pop(name) for name in options}
        command(**given, pixels=Pixels(**chosen))

    # Typer, and what expands other options, reads a command's options from these two.
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return expanded


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(_number(option, part) for part in split([text]))


def _number(option: str, text: str) -> float:
    """Read ``0.5`` or ``1/255``."""
    numerator, slash, denominator = text.partition("/")
    try:
        return float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{option} {text}: give a number, such as 0.5 or 1/255") from None
