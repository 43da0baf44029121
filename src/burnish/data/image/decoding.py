"""One image file becomes 8-bit pixels of the size that a model takes; Pillow is imported where it is first needed."""

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
"""Of the files that are read, as Pillow calls them. It knows others, whatever the suffix, and runs Ghostscript for one."""
LOSSY = ("JPEG", "MPO")
"""The formats that change the values of pixels."""
WIDE_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits: what it makes of them in 8 bits is cut off at 255."""
MOST_PIXELS = 100_000_000
"""A picture of more is refused by its header, before memory is taken for it."""
DRAFT_FROM = 1 << 20
"""Pixels from which on a JPEG file may be decoded at a half, a quarter or an eighth of its size."""
DRAFT_GAP = 2
"""How many times larger than wanted a JPEG file is decoded at least, so that the resize after it hides the difference."""
_BYTES_OF_DECODERS = {"JPEG": 6, "MPO": 6, "WEBP": 12}
"""For each pixel, besides the image: the coefficients of a JPEG file of several scans, in 16 bits; three copies of WebP."""
_BYTES_OF_POINTERS = 8
"""For each row of an image."""
_BYTES_OF_WEIGHTS = 48
"""For each column and row, what Pillow takes at most to resize: float64, at three samples on either side of a pixel."""
ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""
ChooseBox = Callable[[int, int], Box]
"""``(width, height) -> box``: the part of an image that is resized to what the model takes."""


class Opens(Protocol):
    """An image that is no file of its own, such as a member of an archive; ``str`` names it."""

    def open(self) -> BinaryIO:
        """Return its bytes as a file."""
        ...


Picture = Path | Opens


class UnreadableImage(DataError):
    """An image that cannot be decoded; another file may be.

    Attributes:
        what: its name, and why, in short.
    """

    def __init__(self, picture: Picture, reason: str):
        super().__init__(f"{picture}: damaged, or no image ({reason}); repair or remove it")
        self.what = f"{picture} ({reason})"


def decode(picture: Picture, preprocessing: Preprocessing, choose_box: ChooseBox | None = None) -> Image.Image:
    """Return an image in the size, and in gray or RGB, as ``preprocessing`` says.

    It is turned as its EXIF orientation says. A large JPEG file is decoded at a fraction of its size, twice as large as wanted or
    more: its pixels then differ by rounding and by the filter of the format.

    Args:
        picture: the file.
        preprocessing: what is done to an image; its size and channels are known.
        choose_box: what is cut out, in place of the centre; the box is stretched to the size.

    Raises:
        UnreadableImage: damaged, no image, of more than 100 million pixels, or of too many for the memory that it may take.
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
    """Give an image and the bytes of its file. Its header has been read; its pixels are when they are first asked for.

    Raises:
        UnreadableImage: no image of a format that is read, or damaged, here or where its pixels are read.
        DataError: its pixels do not fit into memory.
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
    except Exception as error:  # Pillow's readers raise whatever a damaged file makes them
        raise UnreadableImage(picture, str(error) or type(error).__name__) from error


@cache
def _quieten() -> None:
    """Let Pillow's warnings of large pictures, damaged EXIF and palettes not be printed, unless somebody asks for them."""
    warnings.filterwarnings("ignore", module=r"(.*/)?PIL[./]", append=True)


def check_memory(image: Image.Image, size: int, further: int) -> None:
    """Raise ValueError where an image has too many pixels, or takes too much memory with what is made of it.

    Args:
        image: its header has been read.
        size: bytes of its file.
        further: bytes of what is made of it.
    """
    pixels = image.width * image.height
    if pixels > MOST_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, and {MOST_PIXELS // 10**6} million are read at most")
    excess = memory_excess(_bytes_of(image.mode) * pixels + _BYTES_OF_POINTERS * image.height + further, size)
    if excess is not None:
        raise ValueError(excess)


def _bytes_of(mode: str) -> int:
    """Return how many bytes Pillow keeps for each pixel."""
    return 1 if mode in ("1", "L", "P") else 4


def _decoded(image: Image.Image, size: int, preprocessing: Preprocessing, choose_box: ChooseBox | None) -> Image.Image:
    from PIL import Image

    decoding = _BYTES_OF_DECODERS.get(image.format or "", 0) * image.width * image.height
    if image.format not in LOSSY:  # to know how a PNG file is turned, Pillow reads its pixels
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
            image.draft(cast(str, None), (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))
    mode = "L" if preprocessing.channels == "gray" else "RGB"
    copies = (image.mode != mode) + (turn is not None)
    # Pillow resizes along rows first: of a tall image that is to be wide it makes a large one on the way.
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
    """Return what an image is resized to, width and height, and the left upper corner of what is cut out then, or None.

    Where the centre is cut out, sides and corner are rounded as torchvision's Resize and CenterCrop round them.
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
    """Return width and height of an image as its EXIF orientation turns it, from its header.

    Raises:
        UnreadableImage: no image, or of more than 100 million pixels.
    """
    with opened(picture) as (image, size):
        check_memory(image, size, 0)
        return upright_sides(image, turn_of(image))


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return what brings an image upright, as its EXIF orientation says."""
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
    except Exception:  # damaged EXIF, of whatever kind: the picture itself may be whole
        return None


def upright_sides(image: Image.Image, turn: Image.Transpose | None) -> tuple[int, int]:
    """Return width and height of an image after ``turn_of`` has been applied."""
    from PIL import Image

    turned = (Image.Transpose.TRANSPOSE, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270)
    width, height = image.size
    return (height, width) if turn in turned else (width, height)


def pixels_of(image: Image.Image) -> np.ndarray:
    """Return an image in gray or RGB as uint8 [height, width, channels]."""
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, -1)
