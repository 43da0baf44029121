"""Preprocessing of image pixels, as a value with named presets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

import numpy as np

from burnish.errors import ConfigurationError, DataError
from burnish.program import Entry
from burnish.settings import PlainSettings, suggestion, with_settings
from burnish.validation import is_number, is_whole

Layout = Literal["NCHW", "NHWC", "NHW"]

LAYOUTS = ("NCHW", "NHWC", "NHW")
CHANNELS = ("rgb", "bgr", "gray")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
STRETCH, CROP = "stretch", "crop"
RESIZES = (STRETCH, CROP)
SHORTER_SIDE = 256 / 224
"""Shorter side before a center crop, relative to the crop: the usual ratio for ImageNet evaluation."""
LARGEST = 255


@dataclass(frozen=True, kw_only=True)
class Preprocessing(PlainSettings):
    """Preprocessing of an 8-bit image: each channel becomes ``(pixel * scale - mean) / std``.

    Values are computed in float64 and rounded once to the input's dtype. size, channels and layout may be None until the input is
    known (``for_images``).

    Attributes:
        scale: factor of a pixel (0 to 255).
        mean, std: one number, or one per channel in the input's order; std is above 0.
        interpolation: Pillow's filter: nearest, bilinear, bicubic, box, hamming or lanczos; all but nearest antialias.
        resize: ``stretch`` ignores the aspect ratio; ``crop`` resizes the shorter side to ``shorter_side`` and takes the center,
            like torchvision's evaluation transforms.
        shorter_side: in pixels, for ``crop``; by default 8/7 of the larger side of ``size`` (256 for 224).
        size: height and width of the input.
        channels: ``rgb``, ``bgr`` or ``gray`` (luma of ITU-R 601, as in Pillow).
        layout: ``NCHW``, ``NHWC`` or ``NHW``.
    """

    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: str = "bilinear"
    resize: str = STRETCH
    shorter_side: int | None = None
    size: tuple[int, int] | None = None
    channels: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        if not is_number(self.scale) or not self.scale > 0:
            raise ConfigurationError(f"pixels: scale={self.scale!r}: give a number above 0, such as 1/255")
        for name, least in (("mean", -math.inf), ("std", 0.0)):
            object.__setattr__(self, name, _per_channel(name, getattr(self, name), least))
        if 1 not in (len(self.mean), len(self.std)) and len(self.mean) != len(self.std):
            raise ConfigurationError(
                f"pixels: {len(self.mean)} numbers for mean and {len(self.std)} for std: give one number, or one for each channel"
            )
        for name, known in (("interpolation", INTERPOLATIONS), ("resize", RESIZES), ("channels", CHANNELS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value not in known and not (value is None and name in ("channels", "layout")):
                raise ConfigurationError(
                    f"pixels: {name}={value!r}{suggestion(str(value), known)}: choose among {', '.join(known)}"
                )
        if self.size is not None:
            object.__setattr__(self, "size", _sides(self.size))
        if self.shorter_side is not None and (not is_whole(self.shorter_side) or self.shorter_side < 1):
            raise ConfigurationError(f"pixels: shorter_side={self.shorter_side!r}: give a number of pixels")
        if self.shorter_side is not None and self.resize != CROP:
            raise ConfigurationError("pixels: shorter_side is for resize='crop'; leave it out, or give that")
        if self.size is not None and self.shorter_side is not None and self.shorter_side < max(self.size):
            raise ConfigurationError(
                f"pixels: {self.size[0]} x {self.size[1]} cannot be cut out of an image whose shorter side is "
                f"{self.shorter_side}: give a shorter_side of {max(self.size)} or more, or resize='stretch'"
            )

    @property
    def side(self) -> int:
        """The shorter side before a center crop; requires a known size."""
        assert self.size is not None
        return self.shorter_side or round(max(self.size) * SHORTER_SIDE)

    def for_images(self, entry: Entry, source: str) -> Preprocessing:
        """Return the preprocessing completed by the model's input: size, channels and layout.

        Args:
            entry: the input.
            source: name for errors.

        Raises:
            DataError: the input does not take images or contradicts the settings, the size stays open, or an integer input would
                get fractions.
        """
        layout, count, height, width = image_layout(entry, source, self.layout, self.channels)
        channels = self.channels or ("gray" if count == 1 else "rgb")
        if (channels == "gray") is not (count == 1):
            raise DataError(
                f"{source}: the model's input '{entry.name}' takes {count} channel{'s' * (count > 1)}, and the pixels are to be "
                f"{channels}: leave channels out"
            )
        if self.layout not in (None, layout):
            raise DataError(
                f"{source}: the model's input '{entry.name}' has shape {shape_text(entry.extents)}, which is {layout} and not "
                f"{self.layout}: leave the layout out"
            )
        fixed = (height, width)
        if None in fixed and self.size is None:
            raise DataError(
                f"{source}: the model's input '{entry.name}' leaves the size of an image open; "
                "say which one to resize to (--image-size HEIGHT WIDTH)"
            )
        if self.size is not None and any(side not in (None, asked) for side, asked in zip(fixed, self.size, strict=True)):
            raise DataError(
                f"{source}: the model's input '{entry.name}' takes images of {_side(height)} x {_side(width)}, and --image-size "
                f"says {self.size[0]} x {self.size[1]}: leave it out"
            )
        sides = (height or self.size[0], width or self.size[1]) if self.size is not None else (height, width)
        described = replace(self, size=cast(tuple[int, int], sides), channels=channels, layout=layout)
        described.table(entry, count, source)
        return described

    def table(self, entry: Entry, channels: int, source: str) -> np.ndarray:
        """Return the value of each pixel, [channels, 256], in the dtype of the model's input.

        Raises:
            DataError: the number of channels differs, or an integer input would get fractions.
        """
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, channels):
                raise DataError(
                    f"{source}: pixels: {name} has {len(numbers)} numbers, and input '{entry.name}' of shape "
                    f"{shape_text(entry.extents)} takes {channels} channel{'s' * (channels > 1)}: give one number for all, "
                    "or one for each channel"
                )
        dtype = entry.numpy_dtype
        pixels = np.arange(LARGEST + 1, dtype=np.float64)
        mean, std = (np.broadcast_to(np.asarray(one, np.float64)[:, None], (channels, 1)) for one in (self.mean, self.std))
        values = (pixels * self.scale - mean) / std
        if entry.dtype.is_floating_point():
            with np.errstate(over="ignore"):
                held = values.astype(dtype)
            if not np.isfinite(held).all():
                raise DataError(
                    f"{source}: the model's input '{entry.name}' takes {dtype}, and {self.formula()} gives values that it cannot "
                    "hold: choose a smaller scale, or a larger std"
                )
            return held
        with np.errstate(invalid="ignore"):
            whole = values.astype(dtype)
        if not np.array_equal(whole, values):
            raise DataError(
                f"{source}: the model's input '{entry.name}' takes whole numbers ({dtype}), and {self.formula()} gives others: "
                "take the pixels as they are (pixels='raw')"
            )
        return whole

    def formula(self) -> str:
        """Return the formula, such as ``(pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]``."""
        divisor = 1 / self.scale
        scaled = "pixel"
        if self.scale != 1:
            by = f"/ {round(divisor)}" if divisor >= 1 and abs(divisor - round(divisor)) < 1e-9 * divisor else f"* {self.scale!r}"
            scaled += f" {by}"
        if any(self.mean):
            scaled += f" - {_numbers(self.mean)}"
        if any(value != 1 for value in self.std):
            scaled = f"({scaled})" if " " in scaled else scaled
            scaled += f" / {_numbers(self.std)}"
        return scaled

    def text(self) -> str:
        """Return all known settings in one line."""
        parts = []
        if self.size is not None:
            size = f"{self.size[0]} x {self.size[1]}"
            if self.resize == CROP:
                parts.append(f"shorter side resized to {self.side} ({self.interpolation}), {size} cut out of the centre")
            else:
                parts.append(f"resized to {size} ({self.interpolation})")
        if self.channels is not None:
            parts.append(self.channels.upper() if self.channels != "gray" else self.channels)
        if self.layout is not None:
            parts.append(self.layout)
        return ", ".join([*parts, f"values {self.formula()}"])

    def options(self) -> dict[str, Any]:
        """Return the settings as JSON-compatible values for ``read_pixels``."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def image_layout(
    entry: Entry, source: str, layout: str | None = None, channels: str | None = None
) -> tuple[Layout, int, int | None, int | None]:
    """Return layout, channels, height and width of an image input (None for symbolic extents).

    Args:
        entry: the input.
        source: name for errors.
        layout: layout to assume if the shape is ambiguous.
        channels: channels to assume if their number is symbolic; color by default.

    Raises:
        DataError: the shape is not that of gray or color images.
    """
    shape = entry.extents
    opened = 1 if channels == "gray" else 3
    if len(shape) == 3:
        return "NHW", 1, _extent(shape[1]), _extent(shape[2])
    if len(shape) == 4:
        for candidate, axis, (height, width) in (("NCHW", 1, (2, 3)), ("NHWC", 3, (1, 2))):
            count = _extent(shape[axis])
            if (layout == candidate and count is None) or (layout in (None, candidate) and count in (1, 3)):
                return cast(Layout, candidate), count or opened, _extent(shape[height]), _extent(shape[width])
        if layout is not None:
            return image_layout(entry, source)
    raise DataError(
        f"{source}: the model's input '{entry.name}' has shape {shape_text(shape)}, which is not that of images: "
        "[batch, channels, height, width], [batch, height, width, channels] with 1 or 3 channels, or [batch, height, width]; "
        "where it leaves the channels open, say the layout (--layout NCHW or NHWC)"
    )


def of_bytes(array: np.ndarray, entry: Entry, pixels: Preprocessing, source: str) -> np.ndarray:
    """Return an array of bytes as the floating-point values of a model's input.

    Args:
        array: uint8, in the shape of the input; channels keep their order.
        entry: the input.
        pixels: preprocessing of a byte.
        source: name for errors.

    Raises:
        DataError: the settings have numbers per channel, and the input does not have these channels.
    """
    if len(pixels.mean) == len(pixels.std) == 1:
        return np.asarray(np.take(pixels.table(entry, 1, source)[0], array))
    try:
        layout, channels, _, _ = image_layout(entry, source, pixels.layout, pixels.channels)
    except DataError:
        layout, channels = "NHW", 1
    table = pixels.table(entry, channels, source)
    axis = {"NCHW": 1, "NHWC": 3, "NHW": 0}[layout]
    if layout == "NHW":
        return np.asarray(np.take(table[0], array))
    values = np.empty(array.shape, entry.numpy_dtype)
    for channel in range(channels):
        place = (slice(None),) * axis + (channel,)
        values[place] = table[channel][array[place]]
    return values


def shape_text(shape: Sequence[int | str | None]) -> str:
    """Return a text such as ``[batch, 3, 224, 224]``, with ``?`` for an unknown extent."""
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"


def takes_bytes(array: np.ndarray, entry: Entry) -> bool:
    """True if an array of bytes fills a floating-point input, so that it holds pixels."""
    return bool(array.dtype == np.uint8 and entry.dtype.is_floating_point())


def _per_channel(name: str, numbers: Any, above: float) -> tuple[float, ...]:
    values = tuple(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else (numbers,)
    if len(values) not in (1, 3) or not all(is_number(value) and value > above for value in values):
        kind = "finite numbers" if above == -math.inf else "numbers above 0"
        raise ConfigurationError(f"pixels: {name}={numbers!r}: give {kind}, one or three: one for each channel")
    return tuple(float(value) for value in values)


def _sides(size: Any) -> tuple[int, int]:
    sides = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else ()
    if len(sides) != 2 or not all(is_whole(side) and side >= 1 for side in sides):
        raise ConfigurationError(f"pixels: size={size!r}: give height and width in pixels")
    return int(sides[0]), int(sides[1])


def _numbers(values: Sequence[float]) -> str:
    texts = [repr(value).removesuffix(".0") for value in values]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _side(extent: int | None) -> str:
    return "any" if extent is None else str(extent)


def _extent(dimension: int | str | None) -> int | None:
    return dimension if isinstance(dimension, int) else None


PRESETS: dict[str, Preprocessing] = {
    "unit": Preprocessing(),
    "raw": Preprocessing(scale=1.0),
    "-1..1": Preprocessing(mean=(0.5,), std=(0.5,)),
    "imagenet": Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=CROP),
    "caffe": Preprocessing(scale=1.0, mean=(103.939, 116.779, 123.68), resize=CROP, channels="bgr"),
}
"""Presets by name. ``imagenet`` is that of torchvision's ImageNet models, ``caffe`` that of models converted from Caffe (BGR
minus ImageNet's mean).
"""
UNIT, RAW = PRESETS["unit"], PRESETS["raw"]

PixelsLike = str | Mapping[str, Any] | Preprocessing


def read_pixels(pixels: PixelsLike, base: Preprocessing = UNIT) -> Preprocessing:
    """Return a preset by its name, or settings that change a ``preset`` among them, else ``base``.

    Raises:
        ConfigurationError: an unknown preset or setting, or an invalid value.
    """
    if isinstance(pixels, Preprocessing):
        return pixels
    if isinstance(pixels, str):
        if pixels not in PRESETS:
            raise ConfigurationError(
                f"pixels: there is no '{pixels}'{suggestion(pixels, PRESETS)}; give {', '.join(PRESETS)}, or settings by name"
            )
        return PRESETS[pixels]
    if not isinstance(pixels, Mapping):
        raise ConfigurationError(
            f"pixels={pixels!r}: give {', '.join(PRESETS)}, a burnish.data.Preprocessing, or its settings by name"
        )
    settings = dict(pixels)
    base = read_pixels(settings.pop("preset", base))
    return with_settings("pixels", Preprocessing, {**_fields(base), **settings})


def default_for(entry: Entry) -> Preprocessing:
    """Return the default: 0 to 1 for floating-point inputs, unchanged pixels for integers."""
    return UNIT if entry.dtype.is_floating_point() else RAW


def _fields(described: Preprocessing) -> dict[str, Any]:
    return {field.name: getattr(described, field.name) for field in fields(described)}
