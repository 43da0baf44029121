"""Reads image files as a model takes them: finds them, resizes them, and makes numbers of their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.preprocessing import CROP, Preprocessing
from burnish.errors import DataError
from burnish.program import Entry

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
CACHED_BYTES = 1 << 30
WIDE_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits: what it makes of them in 8 bits is cut off at 255."""


class ImageReader:
    """Reads image files for one input of a model; pixels are kept while they fit into 1 GiB.

    Args:
        entry: the input.
        preprocessing: what is done to an image; what the input says by itself may be left open.
        source: what to call the data in an error.

    Attributes:
        preprocessing: the same, with nothing left open.

    Raises:
        DataError: Pillow is missing, or the input and the description do not go together.
    """

    def __init__(self, entry: Entry, preprocessing: Preprocessing, source: str):
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise DataError(f"{source}: images are read with Pillow, which is not installed; pip install Pillow") from error
        self.entry = entry
        self.preprocessing = preprocessing.for_images(entry, source)
        self._channels = 1 if self.preprocessing.channels == "gray" else 3
        self._table = self.preprocessing.table(entry, self._channels, source)
        assert self.preprocessing.size is not None
        height, width = self.preprocessing.size
        self._cached_images = CACHED_BYTES // (height * width * self._channels)
        self._cache: dict[Path, np.ndarray] = {}

    def batch(self, files: Sequence[Path]) -> np.ndarray:
        """Return images in the layout and dtype of the input, the samples first.

        Raises:
            DataError: an image that cannot be read, by its file name.
        """
        pixels = np.stack([self._pixels(file) for file in files])
        channels = [self._table[channel][pixels[..., channel]] for channel in range(self._channels)]
        if self.preprocessing.layout == "NHW":
            return channels[0]
        return np.stack(channels, axis=1 if self.preprocessing.layout == "NCHW" else 3)

    def _pixels(self, file: Path) -> np.ndarray:
        """One image, uint8, [height, width, channels], the channels in the model's order."""
        cached = self._cache.get(file)
        if cached is not None:
            return cached
        from PIL import Image

        channels = self.preprocessing.channels
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith(WIDE_MODES):
                    raise DataError(
                        f"{file}: its pixels have more than 8 bits (mode {opened.mode}); convert it to 8 bits, or read it "
                        "yourself and give arrays (.npz)"
                    )
                image = _resized(opened.convert("L" if channels == "gray" else "RGB"), self.preprocessing)
                array = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, self._channels)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{file}: damaged, or no image ({error}); repair or remove it") from error
        if channels == "bgr":
            array = array[..., ::-1]
        if len(self._cache) < self._cached_images:
            self._cache[file] = array
        return array


def _resized(image, preprocessing: Preprocessing):  # type: ignore[no-untyped-def]  # Pillow is not imported before it is needed
    """Return an image in the size that a model takes.

    Where its centre is cut out, sides and corner are rounded as torchvision's Resize and CenterCrop round them.
    """
    from PIL import Image

    assert preprocessing.size is not None
    height, width = preprocessing.size
    how = Image.Resampling[preprocessing.interpolation.upper()]
    if preprocessing.resize != CROP:
        return image if image.size == (width, height) else image.resize((width, height), how)
    short, long = sorted(image.size)
    longer_side = int(preprocessing.side * long / short)
    is_upright = image.width <= image.height
    sides = (preprocessing.side, longer_side) if is_upright else (longer_side, preprocessing.side)
    if image.size != sides:
        image = image.resize(sides, how)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def image_files(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
