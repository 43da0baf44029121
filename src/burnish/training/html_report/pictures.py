"""Pictures of samples: pixel preprocessing undone, masks and boxes drawn, PNG written by Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from burnish.data.preprocessing import LAYOUTS, Preprocessing
from burnish.installing import install_command

GAP = 2
"""Columns between the parts of a picture."""


def missing_pillow() -> str | None:
    """Return the reason why pictures cannot be written; None if Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return f"pictures of samples need Pillow, which is not installed ({install_command('PIL')})"
    return None


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of pixels: uint8, [height, width] for gray, or [height, width, 3] for red, green and blue."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pixels_of(sample: np.ndarray, preprocessing: Preprocessing | None) -> np.ndarray | None:
    """Return one sample as pixels for ``png``; None if it is no gray or color image.

    Args:
        sample: input of the model, without the batch axis.
        preprocessing: preprocessing of the pixels; None if unknown: values are then stretched to 0 to 255.
    """
    layout = _layout(sample, preprocessing)
    if layout is None:
        return None
    values = sample.astype(np.float64)
    if layout == "NHW":
        values = values[..., None]
    elif layout == "NCHW":
        values = values.transpose(1, 2, 0)
    if preprocessing is not None and sample.dtype != np.uint8:
        values = (values * np.array(preprocessing.std) + np.array(preprocessing.mean)) / preprocessing.scale
    elif sample.dtype != np.uint8:
        low, high = float(np.min(values)), float(np.max(values))
        values = (values - low) * (255 / (high - low or 1.0))
    if preprocessing is not None and preprocessing.channels == "bgr":
        values = values[..., ::-1]
    rounded = np.clip(np.nan_to_num(values).round(), 0, 255).astype(np.uint8)
    return rounded[..., 0] if rounded.shape[-1] == 1 else rounded


def side_by_side(picture: np.ndarray | None, masks: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return a picture and masks side by side, uint8 [height, width, 3].

    Args:
        picture: uint8, [height, width] or [height, width, 3], of the size of the masks; left out if None or of another size.
        masks: class indices, [height, width] each; other values are black.
        classes: number of classes.
    """
    colours = class_colours(classes)
    parts = [colours[np.where((mask >= 0) & (mask < classes), mask, classes)] for mask in masks]
    if picture is not None and picture.shape[:2] == parts[0].shape[:2]:
        parts.insert(0, picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2))
    return joined(parts)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return pictures of one height side by side: uint8 [height, width, 3]."""
    gap = np.full((parts[0].shape[0], GAP, 3), 255, np.uint8)
    return np.concatenate([piece for part in parts for piece in (part, gap)][:-1], axis=1)


def class_colours(classes: int) -> np.ndarray:
    """Return a colour per class, evenly around the wheel with the first dark gray, then black: uint8, [classes + 1, 3]."""
    hues = np.arange(max(classes - 1, 1)) / max(classes - 1, 1)
    # At full saturation and value (Smith 1978), each channel is a trapezoid over the hue.
    shifted = (hues[:, None] * 6 + np.array([0.0, 4.0, 2.0])) % 6
    wheel = np.clip(np.abs(shifted - 3) - 1, 0, 1)[: classes - 1]
    return (np.concatenate([[[0.25] * 3], wheel, [[0.0] * 3]]) * 255).astype(np.uint8)


def drawn_on(picture: np.ndarray, boxes: np.ndarray, colours: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return a picture in colour with the outlines of boxes; wrong ones are twice as wide.

    Args:
        picture: uint8, [height, width] or [height, width, 3].
        boxes: left, top, right, bottom, as fractions, ``[boxes, 4]``.
        colours: uint8, ``[boxes, 3]``.
        right: True for correct boxes, ``[boxes]``.
    """
    drawn = picture.copy() if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2)
    height, width = drawn.shape[:2]
    line = 1 + max(height, width) // 320
    for box, colour, is_right in zip(boxes, colours, right, strict=True):
        left, top, end, bottom = (np.clip(box, 0, 1) * [width, height, width, height]).round().astype(int)
        thick = line if is_right else 2 * line
        inside = np.zeros((height, width), bool)
        inside[top : max(bottom, top + 1), left : max(end, left + 1)] = True
        inside[top + thick : max(bottom - thick, 0), left + thick : max(end - thick, 0)] = False
        drawn[inside] = colour
    return drawn


def _layout(sample: np.ndarray, preprocessing: Preprocessing | None) -> str | None:
    fits = {
        "NHW": sample.ndim == 2 and min(sample.shape) > 1,
        "NCHW": sample.ndim == 3 and sample.shape[0] in (1, 3),
        "NHWC": sample.ndim == 3 and sample.shape[2] in (1, 3),
    }
    known = None if preprocessing is None else preprocessing.layout
    if known is not None:
        return known if fits[known] else None
    if preprocessing is None and sample.ndim == 2:  # more likely a sequence of vectors
        return None
    return next((layout for layout in LAYOUTS if fits[layout]), None)
