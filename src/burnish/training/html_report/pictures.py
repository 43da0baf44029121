"""Samples of images as pictures: what was done to their pixels is undone, and they are written as PNG."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from burnish.data.preprocessing import LAYOUTS, Preprocessing

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GRAY, COLOR = 0, 2
"""Color types of PNG (W3C, Portable Network Graphics, third edition, section 11.2.1)."""


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of pixels: uint8, [height, width] for gray, or [height, width, 3] for red, green and blue."""
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, GRAY if pixels.ndim == 2 else COLOR, 0, 0, 0)
    rows = pixels.reshape(height, -1)
    # Each row begins with the number of its filter, here none.
    content = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(content)) + _chunk(b"IEND", b"")


def data_address(content: bytes) -> str:
    """Return the address of a PNG file that holds the file itself."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")


def pixels_of(sample: np.ndarray, preprocessing: Preprocessing | None) -> np.ndarray | None:
    """Return one sample as pixels, as ``png`` takes them; None where it is no gray or color image.

    Args:
        sample: what the model reads, without the axis of the batch.
        preprocessing: what was done to the pixels; None where that is not known: the values are then stretched to 0 to 255.
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


def _layout(sample: np.ndarray, preprocessing: Preprocessing | None) -> str | None:
    """Where the channels of a sample stand; None where it is no image."""
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


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
