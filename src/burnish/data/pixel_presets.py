"""Named preprocessing of pixels, as models usually read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from burnish.data.preprocessing import CROP, Preprocessing
from burnish.errors import ConfigurationError
from burnish.program import Entry
from burnish.settings import suggestion, with_settings

PRESETS: dict[str, Preprocessing] = {
    "unit": Preprocessing(),
    "raw": Preprocessing(scale=1.0),
    "-1..1": Preprocessing(mean=(0.5,), std=(0.5,)),
    "imagenet": Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=CROP),
    "caffe": Preprocessing(scale=1.0, mean=(103.939, 116.779, 123.68), resize=CROP, channels="bgr"),
}
"""What is done to pixels, by name: ``imagenet`` is what torchvision's models of ImageNet read (scale, mean and standard deviation
of its classification presets), ``caffe`` what models converted from Caffe do (BGR, the mean of ImageNet taken off)."""
UNIT, RAW = PRESETS["unit"], PRESETS["raw"]

PixelsLike = str | Mapping[str, Any] | Preprocessing


def get(pixels: PixelsLike, base: Preprocessing = UNIT) -> Preprocessing:
    """Return a description: a preset by its name, or settings by name, which change their ``preset``, else ``base``.

    Raises:
        ConfigurationError: no such preset or setting, or a value that it cannot have.
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
    base = get(settings.pop("preset", base))
    return with_settings("pixels", Preprocessing, {**_fields(base), **settings})


def default_for(entry: Entry) -> Preprocessing:
    """Return the default: 0 to 1 for an input of floating point, the pixels themselves for one of integers."""
    return UNIT if entry.dtype.is_floating_point() else RAW


def _fields(described: Preprocessing) -> dict[str, Any]:
    return {field.name: getattr(described, field.name) for field in fields(described)}
