"""Decoding of an image file to 8-bit pixels of the model's size. Pillow is imported on first use."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import numpy as np

from burnish.data.preprocessing import CROP, Preprocessing
from burnish.errors import DataError
from burnish.untrusted_files import memory_excess

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Pillow's names of accepted formats. It supports others, whatever the suffix, and runs Ghostscript for one."""
LOSSY = ("JPEG", "MPO")
"""Lossy formats."""
WIDE_MODES = ("I", "F")
"""Pillow modes of more than 8 bits; conversion to 8 bits would clip at 255."""
MOST_PIXELS = 100_000_000
"""Larger pictures are refused by their header, before memory is allocated."""
DRAFT_FROM = 1 << 20
"""JPEG files with more pixels may be decoded at a half, a quarter or an eighth of their size."""
DRAFT_GAP = 2
"""JPEG files are decoded at least this many times larger than needed, so that the resize hides the difference."""
_BYTES_OF_DECODERS = {"JPEG": 6, "MPO": 6, "WEBP": 12}
"""Bytes per pixel besides the image: 16-bit coefficients of a progressive JPEG; three copies of WebP."""
_BYTES_OF_POINTERS = 8
"""Bytes per image row."""
_BYTES_OF_WEIGHTS = 48
"""Most bytes per column and row for resizing in Pillow: float64, three samples on either side of a pixel."""
ORIENTATION = 0x0112
"""EXIF tag of the camera's orientation."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""
ChooseBox = Callable[[int, int], Box]
"""``(width, height) -> box``: the part of an image to resize to the model's size."""


class Opens(Protocol):
    """An image without its own file, such as an archive member; ``str`` names it."""

    def open(self) -> BinaryIO:
        """Return the encoded image as a file."""
        ...


Picture = Path | Opens


class UnreadableImage(DataError):
    """An image that cannot be decoded.

    Attributes:
        what: its name and a short reason.
    """

    def __init__(self, picture: Picture, reason: str):
        super().__init__(f"{picture}: damaged, or no image ({reason}); repair or remove it")
        self.what = f"{picture} ({reason})"


def decode(picture: Picture, preprocessing: Preprocessing, choose_box: ChooseBox | None = None) -> Image.Image:
    """Return an image in the size and mode (gray or RGB) of ``preprocessing``, turned by its EXIF orientation.

    Large JPEG files are decoded at a fraction of their size, at least twice as large as needed, which changes pixels slightly.

    Args:
        picture: the file.
        preprocessing: with known size and channels.
        choose_box: part to stretch to the size, instead of the center.

    Raises:
        UnreadableImage: damaged, not an image, above 100 million pixels, or too large for memory.
        DataError: pixels of more than 8 bits.
    """
    with opened(picture) as (image, size):
        if image.mode.startswith(WIDE_MODES):
            raise DataError(
                f"{picture}: its pixels have more than 8 bits (mode {image.mode}); convert it to 8 bits, or read it yourself "
                "and give arrays (.npz)"
            )
        return _decoded(image, size, preprocessing, choose_box)


@contextmanager
def opened(picture: Picture) -> Iterator[tuple[Image.Image, int]]:
    """Yield an image whose header has been read, and its file size in bytes. Pixels are read on first access.

    Raises:
        UnreadableImage: the image is damaged or of an unsupported format; also raised while the caller reads its pixels.
        DataError: the pixels do not fit into memory.
    """
    from PIL import Image, UnidentifiedImageError

    _quieten()
    try:
        with picture.open("rb") if isinstance(picture, Path) else picture.open() as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            with Image.open(file, formats=FORMATS) as image:
                yield image, size
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{picture}: it does not fit into memory; make the picture smaller, or leave it out") from error
    except UnidentifiedImageError as error:
        raise UnreadableImage(picture, "no format that is read") from error
    except Exception as error:  # Pillow's readers raise any exception for damaged files
        raise UnreadableImage(picture, str(error) or type(error).__name__) from error


@cache
def _quieten() -> None:
    """Silence Pillow's warnings of large pictures, damaged EXIF and palettes, unless the user has set other filters."""
    warnings.filterwarnings("ignore", module=r"(.*/)?PIL[./]", append=True)


def check_memory(image: Image.Image, size: int, further: int) -> None:
    """Raise ValueError if an image has too many pixels or needs too much memory.

    Args:
        image: image whose header has been read.
        size: bytes of its file.
        further: further bytes needed to process it.
    """
    pixels = image.width * image.height
    if pixels > MOST_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, and {MOST_PIXELS // 10**6} million are read at most")
    excess = memory_excess(_bytes_of(image.mode) * pixels + _BYTES_OF_POINTERS * image.height + further, size)
    if excess is not None:
        raise ValueError(excess)


def _bytes_of(mode: str) -> int:
    return 1 if mode in ("1", "L", "P") else 4


def _decoded(image: Image.Image, size: int, preprocessing: Preprocessing, choose_box: ChooseBox | None) -> Image.Image:
    from PIL import Image

    decoding = _BYTES_OF_DECODERS.get(image.format or "", 0) * image.width * image.height
    if image.format not in LOSSY:  # Pillow decodes the pixels of a PNG file to find its orientation
        check_memory(image, size, decoding)
    turn = turn_of(image)
    width, height = upright_sides(image, turn)
    sides, corner = resized_sides(width, height, preprocessing)
    box: Box | None = None
    if choose_box is not None:
        assert preprocessing.size is not None
        box, sides, corner = choose_box(width, height), preprocessing.size[::-1], None
    if image.format == "JPEG" and width * height > DRAFT_FROM:
        covered = (width, height) if box is None else (box[2] - box[0], box[3] - box[1])
        shrink = min(covered[0] / sides[0], covered[1] / sides[1]) / DRAFT_GAP
        if shrink > 1:
            # None keeps the mode; Pillow's annotation lacks it.
            image.draft(cast(str, None), (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))
    mode = "L" if preprocessing.channels == "gray" else "RGB"
    copies = (image.mode != mode) + (turn is not None)
    # Pillow resizes rows first, so the intermediate image can be large: as high as the original, as wide as the result.
    made = copies * image.width * image.height + sides[0] * max(upright_sides(image, turn)[1], sides[1])
    weights = _BYTES_OF_WEIGHTS * (image.width + image.height)
    check_memory(image, size, decoding + _bytes_of(mode) * made + weights)
    image.load()
    if image.mode != mode:
        image = image.convert(mode)
    if turn is not None:
        image = image.transpose(turn)
    how = Image.Resampling[preprocessing.interpolation.upper()]
    if box is not None:
        across, down = image.width / width, image.height / height
        box = (box[0] * across, box[1] * down, min(box[2] * across, image.width), min(box[3] * down, image.height))
    if box is not None or image.size != sides:
        image = image.resize(sides, how, box)
    if corner is None:
        return image
    assert preprocessing.size is not None
    left, top = corner
    return image.crop((left, top, left + preprocessing.size[1], top + preprocessing.size[0]))


def resized_sides(width: int, height: int, preprocessing: Preprocessing) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Return the width and height to resize an image to, and the upper left corner of the crop after it (None for no crop).

    For a center crop, sides and corner are rounded as in torchvision's Resize and CenterCrop.
    """
    assert preprocessing.size is not None
    wanted = preprocessing.size[::-1]
    if preprocessing.resize != CROP:
        return wanted, None
    short, long = sorted((width, height))
    longer_side = int(preprocessing.side * long / short)
    sides = (preprocessing.side, longer_side) if width <= height else (longer_side, preprocessing.side)
    return sides, (round((sides[0] - wanted[0]) / 2), round((sides[1] - wanted[1]) / 2))


def upright_size(picture: Picture) -> tuple[int, int]:
    """Return width and height of an image after its EXIF rotation, from its header.

    Raises:
        UnreadableImage: the file is not an image, or has more than 100 million pixels.
    """
    with opened(picture) as (image, size):
        check_memory(image, size, 0)
        return upright_sides(image, turn_of(image))


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transpose that applies an image's EXIF orientation; None if upright."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF raises any exception, and the pixels may be fine
        return None


def upright_sides(image: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Return width and height of an image after the transpose of ``turn_of``."""
    from PIL import Image

    turned = (Image.Transpose.TRANSPOSE, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270)
    width, height = image.size
    return (height, width) if turn in turned else (width, height)


def pixels_of(image: Image.Image) -> np.ndarray:
    """Return a gray or RGB image as uint8 [height, width, channels]."""
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, -1)
