"""Folders of images: with one subfolder per class, to train and evaluate on; and images without classes, to predict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.images import SUFFIXES, ImageReader, image_files
from burnish.data.pixel_presets import PixelsLike
from burnish.errors import DataError


class ImageFolder:
    """Images in one subfolder per class, read when they are asked for and kept while they fit into 1 GiB.

    Classes are numbered in sorted order of the subfolders' names, images in sorted order of theirs. An image is brought to the
    model's channels, height and width, and its pixels become numbers, as ``preprocessing`` says.

    Args:
        path: the folder.
        spec: what the program takes.
        classes: names of the classes in the order of their indices, instead of the subfolders' sorted names.
        size: height and width of the images, where the model leaves them open.
        pixels: what is done to the pixels: a preset (``imagenet``), a ``Preprocessing``, or its settings; None: what the model's
            metadata says, else division by 255 where the model takes floating point.

    Attributes:
        preprocessing: what is done to an image, with nothing left open.

    Raises:
        DataError: Pillow is missing, no image, a subfolder that is not among ``classes``, more classes than the model has,
            or an input that takes no images, or not these. ``batch`` raises it for an image that cannot be read.
        ConfigurationError: no such pixels.
    """

    def __init__(
        self,
        path: Path,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
    ):
        source = str(path)
        entry = spec.only_data(source)
        label = spec.only_label(source)
        if label.dtype.is_floating_point():
            raise DataError(f"{path}: a folder of images gives classes, and the loss compares with numbers ('{label.name}')")
        self._label = label
        self._reader = ImageReader(entry, spec.preprocessing_for(entry, pixels, size), source)
        self.preprocessing = self._reader.preprocessing
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        self.classes = tuple(classes) if classes is not None else spec.class_order(folders)
        for name in folders:
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
        self._files = [(file, self.classes.index(name)) for name in folders for file in image_files(path / name)]
        if not self._files:
            raise DataError(
                f"{path}: no images; an image folder has one subfolder per class, with {', '.join(sorted(SUFFIXES))} files in it"
            )

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images and class indices.

        Raises:
            DataError: an image that cannot be read, by its file name.
        """
        chosen = [self._files[int(index)] for index in indices]
        labels = np.asarray([label for _, label in chosen], dtype=self._label.numpy_dtype)
        return {self._reader.entry.name: self._reader.batch([file for file, _ in chosen]), self._label.name: labels}


class ImageFiles:
    """Images without labels: a file, or all those in a folder and its subfolders, in sorted order.

    Args:
        path, spec, size, pixels: as ``ImageFolder`` takes them.

    Attributes:
        names: of the files, as ``path`` leads to them.
        preprocessing: what is done to an image, with nothing left open.

    Raises:
        DataError: Pillow is missing, no image, or an input that takes no images, or not these. ``batch`` raises it for an image
            that cannot be read.
    """

    def __init__(self, path: Path, spec: DataSpec, size: tuple[int, int] | None = None, pixels: PixelsLike | None = None):
        entry = spec.only_data(str(path))
        self._reader = ImageReader(entry, spec.preprocessing_for(entry, pixels, size), str(path))
        self.preprocessing = self._reader.preprocessing
        self._files = image_files(path) if path.is_dir() else [path]
        self.names = [str(file) for file in self._files]
        if not self._files:
            raise DataError(f"{path}: no images; {', '.join(sorted(SUFFIXES))} files are read, in subfolders too")

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images.

        Raises:
            DataError: an image that cannot be read, by its file name.
        """
        return {self._reader.entry.name: self._reader.batch([self._files[int(index)] for index in indices])}
