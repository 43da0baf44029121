"""Reading image files as a model takes them: they are found, decoded, and made numbers of."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.image.decoding import Picture, decode, pixels_of
from burnish.data.preprocessing import PixelsLike, Preprocessing
from burnish.errors import DataError
from burnish.installing import install_command
from burnish.program import Entry

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
UNREAD = frozenset({".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".dng", ".cr2", ".nef", ".arw", ".psd", ".exr", ".dcm"})
"""Of files with pictures that are not read."""
CACHED_BYTES = 1 << 30
NAMES_SHOWN = 5


class ImageReader:
    """Reads image files for one input of a model; decoded images are kept while they fit into 1 GiB.

    Args:
        entry: the input.
        preprocessing: what is done to an image; what the input says by itself may be left open.
        source: what to call the data in an error.

    Attributes:
        preprocessing: the same, with nothing left open.
        cached_images: how many decoded images are kept at most.

    Raises:
        DataError: Pillow is missing, or the input and the description do not go together.
    """

    def __init__(self, entry: Entry, preprocessing: Preprocessing, source: str):
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise DataError(f"{source}: images are read with Pillow, which is not installed; {install_command('PIL')}") from error
        self.entry = entry
        self.preprocessing = preprocessing.for_images(entry, source)
        self._channels = 1 if self.preprocessing.channels == "gray" else 3
        self._table = self.preprocessing.table(entry, self._channels, source)
        assert self.preprocessing.size is not None
        height, width = self.preprocessing.size
        self.cached_images = CACHED_BYTES // (height * width * self._channels)
        self._cache: dict[Picture, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What a reading process gets: nothing decoded, and no room to keep it, as which process reads an image changes."""
        return {**self.__dict__, "_cache": {}, "cached_images": 0}

    def read(
        self, picture: Picture, augmentation: ImageAugmentation | None = None, generator: np.random.Generator | None = None
    ) -> np.ndarray:
        """Return the pixels of one image, uint8 [height, width, channels], in gray or RGB.

        Args:
            picture: the file.
            augmentation: what is changed at random; None: nothing.
            generator: draws the changes.

        Raises:
            UnreadableImage: it cannot be decoded.
            DataError: it has more than 8 bits.
        """
        if augmentation is None or generator is None:
            return self._whole(picture)
        from PIL import Image

        if augmentation.crop is not None:
            image = decode(picture, self.preprocessing, lambda width, height: augmentation.box(width, height, generator))
        else:
            whole = self._whole(picture)
            image = Image.fromarray(whole[..., 0] if self._channels == 1 else whole)
        return pixels_of(augmentation.changed(image, generator))

    def numbers(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """Return images that were read in the layout, order of channels and dtype of the input, the samples first."""
        pixels = np.stack(images)
        layout, table = self.preprocessing.layout, self._table
        if layout == "NHW":
            return table[0][pixels[..., 0]]
        height, width = pixels.shape[1:3]
        shape = (len(pixels), self._channels, height, width) if layout == "NCHW" else pixels.shape
        values = np.empty(shape, table.dtype)
        for channel in range(self._channels):
            read = self._channels - 1 - channel if self.preprocessing.channels == "bgr" else channel
            place = values[:, channel] if layout == "NCHW" else values[..., channel]
            place[...] = np.take(table[channel], pixels[..., read])
        return values

    def _whole(self, picture: Picture) -> np.ndarray:
        cached = self._cache.get(picture)
        if cached is not None:
            return cached
        array = pixels_of(decode(picture, self.preprocessing))
        if len(self._cache) < self.cached_images:
            self._cache[picture] = array
        return array


def reader_for(spec: DataSpec, source: str, size: tuple[int, int] | None = None, pixels: PixelsLike | None = None) -> ImageReader:
    """Return what reads images for the only input of a program.

    Args:
        spec: what the program takes.
        source: what to call the data in an error.
        size: height and width of the images, where the model leaves them open.
        pixels: as ``open_dataset`` takes them.

    Raises:
        DataError: Pillow is missing, the program has several inputs, or its input takes no images, or not these.
        ConfigurationError: no such pixels.
    """
    entry = spec.only_data(source)
    return ImageReader(entry, spec.preprocessing_for(entry, pixels, size), source)


def image_files(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted; what is hidden, such as the copies of an editor, is left out.

    Raises:
        OSError: a folder cannot be read.
    """
    return sorted(
        file
        for place, folders, names in os.walk(folder, onerror=_refuse)
        for file in (Path(place, name) for name in (*folders, *names))
        if file.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    )


def _refuse(error: OSError) -> None:
    """Raise what ``os.walk`` would pass over: images that cannot be read would be missing without a word."""
    raise error


def some_of(names: Iterable[object]) -> str:
    """Return names in a line, the first few of many."""
    listed = [str(name) for name in names]
    rest = len(listed) - NAMES_SHOWN
    return ", ".join(listed[:NAMES_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
