"""Image folders: one subfolder per class for training and evaluation, or unlabeled images for prediction."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.image.decoding import Picture, UnreadableImage, upright_size
from burnish.data.image.labelled import LabelledImages, check_class_count, label_of_images
from burnish.data.image.reader import SUFFIXES, UNREAD, image_files, reader_for, some_of
from burnish.data.missing_values import alike_but_for_case
from burnish.data.preprocessing import PixelsLike
from burnish.errors import DataError

EVALUATED = ("val", "valid", "validation", "eval", "evaluation", "dev", "test", "testing")
PARTS = frozenset({"train", "training", *EVALUATED})
"""Names of the parts of a dataset that is already split."""


class ImageFolder(LabelledImages):
    """Images in one subfolder per class, read on demand; up to 1 GiB of decoded images is cached.

    Subfolders (the classes) and images are sorted by name. Empty files are left out, and an unreadable image is replaced by the
    next one of its class; both are counted.

    Args:
        path: the folder.
        spec: inputs of the program.
        classes: class names by index, instead of sorted subfolders.
        size: height and width, if the model leaves them open.
        pixels: preprocessing: a preset (``imagenet``), a ``Preprocessing``, or its settings; by default that of the model's
            metadata, else division by 255 for floating-point inputs.

    Raises:
        DataError: Pillow is missing, there are no images, a class is unknown, two class names look alike, or the input does not
            take these images; in ``batch``, no image of a class is readable.
        ConfigurationError: invalid ``pixels``.
    """

    def __init__(
        self,
        path: Path,
        spec: DataSpec,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
    ):
        spec.only_data(str(path))
        label_of_images(spec, str(path))
        reader = reader_for(spec, str(path), size, pixels)
        folders = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
        check_parts(folders, path)
        notes = check_names(folders, path)
        names = tuple(classes) if classes is not None else spec.class_order(folders)
        for name in folders:
            if name not in names:
                raise DataError(
                    f"{path}: class '{name}' is not among the classes that are trained: {', '.join(names)}; "
                    "remove this folder, or add the class to the training data"
                )
        check_class_count(names, spec, str(path))
        files = [(file, names.index(name)) for name in folders for file in image_files(path / name)]
        notes += _notes_on_files(path, [file for file, _ in files])
        whole = [(file, label) for file, label in files if file.stat().st_size]
        if not files:
            beside = len(image_files(path))
            where = f"its {beside} images lie in no class: " if beside else ""
            raise DataError(
                f"{path}: no images{' in subfolders' if beside else ''}; {where}put them into one subfolder per class. An image "
                f"folder has files of {', '.join(sorted(SUFFIXES))} in these"
            )
        if not whole:
            raise DataError(f"{path}: all of its {len(files)} images are empty files of 0 bytes; write them anew")
        if len(whole) < len(files):
            empty = [file for file, _ in files if not file.stat().st_size]
            notes.append(f"{len(empty):,} of {len(files):,} images are empty files and left out: {some_of(empty)}")
        super().__init__([file for file, _ in whole], [label for _, label in whole], names, spec, reader, str(path), notes)


def check_parts(folders: Sequence[str], path: Path) -> None:
    """Raise DataError if the subfolders are the parts of a split dataset, each with class folders."""
    parts = {name.casefold(): name for name in folders}
    inside = (child for name in folders for child in (path / name).iterdir())
    if not parts or not parts.keys() <= PARTS or not any(child.is_dir() and not child.name.startswith(".") for child in inside):
        return
    train = next((parts[name] for name in ("train", "training") if name in parts), folders[0])
    judged = next((parts[name] for name in EVALUATED if name in parts), None)
    evaluation = "" if judged is None else f", and '{path / judged}' to evaluate on (--eval-data)"
    raise DataError(
        f"{path}: its subfolders {', '.join(map(repr, folders))} are parts of a data set and no classes: give '{path / train}' "
        f"to train on (--data){evaluation}"
    )


def _notes_on_files(path: Path, files: Sequence[Path]) -> list[str]:
    notes: list[str] = []
    deep = {file.parent.relative_to(path) for file in files if file.parent.parent != path}
    if deep:
        classes = sorted({folder.parts[0] for folder in deep})
        notes.append(
            f"images in subfolders of a class's folder are of that class ({some_of(sorted(deep))}): "
            f"{'give' if len(classes) == 1 else 'give each of'} {some_of(path / name for name in classes)} as data where these "
            "are classes"
        )
    beside = sorted(child for child in path.iterdir() if child.suffix.lower() in SUFFIXES and child.is_file())
    if beside:
        plural = "s" * (len(beside) > 1)
        notes.append(f"{len(beside):,} image{plural} beside the classes' folders, of no class, left out: {some_of(beside)}")
    unread = image_files(path, UNREAD)
    if unread:
        notes.append(
            f"{len(unread):,} picture{'s' * (len(unread) > 1)} in formats that are not read, left out: {some_of(unread)}"
        )
    return notes


def check_names(folders: Sequence[str], path: Path) -> list[str]:
    """Return notes on class names that differ only in case.

    Raises:
        DataError: two names look the same: they differ only in surrounding spaces or in the encoding of accents.
    """
    seen: dict[str, str] = {}
    for name in folders:
        plain = unicodedata.normalize("NFC", name).strip()
        if plain in seen:
            raise DataError(
                f"{path}: the classes {seen[plain]!r} and {name!r} are one, but for spaces or how accents are encoded; "
                "put their images into one folder"
            )
        seen[plain] = name
    return alike_but_for_case(folders)


class ImageFiles:
    """Unlabeled images: a file, or all files in a folder and its subfolders, sorted.

    Each image is decoded at the start; unreadable ones are left out and named in ``note``.

    Args:
        path, spec, size, pixels: see ``ImageFolder``.
        pictures: images that are not files of their own.
        all_read: True to raise for an unreadable image.

    Attributes:
        names: file names, starting with ``path``.
        preprocessing: complete preprocessing.
        note: the files left out, or None.

    Raises:
        DataError: Pillow is missing, no image is readable, or the input does not take them.
    """

    def __init__(
        self,
        path: Path,
        spec: DataSpec,
        size: tuple[int, int] | None = None,
        pixels: PixelsLike | None = None,
        pictures: Sequence[Picture] | None = None,
        all_read: bool = False,
    ):
        self._reader = reader_for(spec, str(path), size, pixels)
        self.preprocessing = self._reader.preprocessing
        files: Sequence[Picture] = pictures if pictures is not None else image_files(path) if path.is_dir() else [path]
        if not files:
            raise DataError(f"{path}: no images; {', '.join(sorted(SUFFIXES))} files are read, in subfolders too")
        self._files: list[Picture] = []
        unreadable: list[UnreadableImage] = []
        for file in files:
            try:
                self._reader.read(file)
            except UnreadableImage as error:
                unreadable.append(error)
            else:
                self._files.append(file)
        if unreadable and (all_read or not self._files):
            raise unreadable[0]
        self.names = [str(file) for file in self._files]
        self.note: str | None = None
        if unreadable:
            named = some_of(error.what for error in unreadable)
            self.note = f"{path}: {len(unreadable):,} of {len(files):,} images cannot be read and are left out: {named}"

    def __len__(self) -> int:
        return len(self._files)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return images.

        Raises:
            DataError: a file can no longer be read.
        """
        return {self._reader.entry.name: self._reader.numbers([self._reader.read(self._files[int(index)]) for index in indices])}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image after its EXIF rotation."""
        return [upright_size(file) for file in self._files]
