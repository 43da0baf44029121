"""Image files as model inputs: search, decoding and conversion to numbers."""

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
"""Suffixes of unsupported picture files."""
CACHED_BYTES = 1 << 30
NAMES_SHOWN = 5


class ImageReader:
    """Reads image files for one input of a model, and caches up to 1 GiB of decoded images.

    Args:
        entry: the input.
        preprocessing: preprocessing of an image; settings that follow from the input may be missing.
        source: name for errors.

    Attributes:
        preprocessing: complete preprocessing of an image.
        cached_images: capacity of the cache, in images.

    Raises:
        DataError: Pillow is missing, or preprocessing and input do not fit together.
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
        """Return the state for a reading process, without a cache: each epoch distributes the images differently."""
        return {**self.__dict__, "_cache": {}, "cached_images": 0}

    def read(
        self, picture: Picture, augmentation: ImageAugmentation | None = None, generator: np.random.Generator | None = None
    ) -> np.ndarray:
        """Return the gray or RGB pixels of an image, uint8 [height, width, channels].

        Args:
            picture: the file.
            augmentation: random changes, or None.
            generator: source of the changes.

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
        """Return a batch of images in the input's layout, channel order and dtype."""
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
    """Return the image reader for the only input of a program.

    Args:
        spec: inputs of the program.
        source: name for errors.
        size: height and width, if the model leaves them open.
        pixels: see ``open_dataset``.

    Raises:
        DataError: Pillow is missing, the program has several inputs, or its input does not take these images.
        ConfigurationError: invalid ``pixels``.
    """
    entry = spec.only_data(source)
    return ImageReader(entry, spec.preprocessing_for(entry, pixels, size), source)


def image_files(folder: Path, suffixes: Collection[str] = SUFFIXES) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted, without hidden files.

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
    """Re-raise an error that ``os.walk`` would skip, so that no images are missing silently."""
    raise error


def some_of(names: Iterable[object]) -> str:
    """Return the first few names in one line, and the number of the others."""
    listed = [str(name) for name in names]
    rest = len(listed) - NAMES_SHOWN
    return ", ".join(listed[:NAMES_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")
