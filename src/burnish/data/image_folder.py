"""Folders of images: one subfolder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.wanted import Wanted, fit_data, image_layout
from burnish.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
CACHED_BYTES = 1 << 30


class ImageFolder:
    """Images in one subfolder per class, read when they are asked for and kept while they fit into 1 GiB.

    Classes are numbered in sorted order of the subfolders' names, images in sorted order of theirs. An image is converted
    to the model's channels (grey or color) and resized to its height and width (bilinear); values are divided by 255
    where the model takes floating point.

    Args:
        path: the folder.
        wanted: what the program takes.
        classes: names of the classes in the order of their indices, instead of the subfolders' sorted names.
        size: height and width of the images, where the model leaves them open.

    Raises:
        DataError: Pillow is missing, no image, a subfolder that is not among ``classes``, more classes than the model has,
            or an input that takes no images. ``batch`` raises it for an image that cannot be read.
    """

    def __init__(self, path: Path, wanted: Wanted, classes: Sequence[str] | None = None, size: tuple[int, int] | None = None):
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise DataError(f"{path}: images are read with Pillow, which is not installed; pip install Pillow") from error
        source = str(path)
        self._entry = wanted.only_data(source)
        label = wanted.only_label(source)
        if label.dtype.is_floating_point():
            raise DataError(f"{path}: a folder of images gives classes, and the loss compares with numbers ('{label.name}')")
        self._label = label
        layout, self._channels, height, width = image_layout(self._entry, source)
        self._layout = layout
        if height is None or width is None:
            if size is None:
                raise DataError(
                    f"{path}: the model's input '{self._entry.name}' leaves the size of an image open; "
                    "say which one to resize to (--image-size HEIGHT WIDTH)"
                )
            height, width = (height or size[0]), (width or size[1])
        elif size is not None and size != (height, width):
            raise DataError(
                f"{path}: the model's input '{self._entry.name}' takes images of {height} x {width}, and --image-size says "
                f"{size[0]} x {size[1]}: leave it out"
            )
        self._size = (height, width)
        found = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        self.classes = tuple(classes) if classes is not None else tuple(found)
        for name in found:
            if name not in self.classes:
                raise DataError(
                    f"{path}: class '{name}' is not among the classes that are trained: {', '.join(self.classes)}; "
                    "remove this folder, or add the class to the training data"
                )
        if label.maximum is not None and len(self.classes) > label.maximum + 1:
            raise DataError(
                f"{path}: {len(self.classes)} classes ({self.classes[0]} ... {self.classes[-1]}), and the model has "
                f"{label.maximum + 1}; take a model with as many outputs as there are classes"
            )
        self._files = [
            (file, self.classes.index(name))
            for name in found
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
        if not self._files:
            raise DataError(
                f"{path}: no images; an image folder has one subfolder per class, with {', '.join(sorted(SUFFIXES))} files in it"
            )
        self._cache: dict[int, np.ndarray] = {}
        image_bytes = height * width * self._channels
        self._cached_images = CACHED_BYTES // image_bytes

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images and class indices.

        Raises:
            DataError: an image that cannot be read, by its file name.
        """
        images = np.stack([self._image(int(index)) for index in indices])
        if self._layout == "NCHW":
            images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        elif self._layout == "NHW":
            images = images[..., 0]
        labels = np.asarray([self._files[int(index)][1] for index in indices], dtype=self._label.numpy_dtype)
        return {self._entry.name: fit_data(images, self._entry, "images"), self._label.name: labels}

    def _image(self, index: int) -> np.ndarray:
        """One image, uint8, [height, width, channels]."""
        cached = self._cache.get(index)
        if cached is not None:
            return cached
        from PIL import Image

        file = self._files[index][0]
        height, width = self._size
        try:
            with Image.open(file) as opened:
                image = opened.convert("L" if self._channels == 1 else "RGB")
                if image.size != (width, height):
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                array = np.asarray(image, dtype=np.uint8).reshape(height, width, self._channels)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{file}: damaged, or no image ({error}); repair or remove it") from error
        if len(self._cache) < self._cached_images:
            self._cache[index] = array
        return array
