"""Folders of images: with one subfolder per class, to train and evaluate on; and images without classes, to predict."""

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
"""Folders of a data set that has been split, each with the classes in it."""


class ImageFolder(LabelledImages):
    """Images in one subfolder per class, read when they are asked for; decoded ones are kept while they fit into 1 GiB.

    Classes are numbered in sorted order of the subfolders' names, images in sorted order of theirs. An image is brought to the
    model's channels, height and width, and its pixels become numbers, as ``preprocessing`` says. Empty files are left out, and
    an image that cannot be decoded is replaced by the next of its class; both are counted.

    Args:
        path: the folder.
        spec: what the program takes.
        classes: names of the classes in the order of their indices, instead of the subfolders' sorted names.
        size: height and width of the images, where the model leaves them open.
        pixels: what is done to the pixels: a preset (``imagenet``), a ``Preprocessing``, or its settings; None: what the model's
            metadata says, else division by 255 where the model takes floating point.

    Raises:
        DataError: Pillow is missing, no image, a subfolder that is not among ``classes``, two of the same name, more classes than
            the model has, or an input that takes no images, or not these. ``batch`` raises it where no image of a class can be
            read.
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
    """Raise DataError where the subfolders are parts of a data set, each with the classes in it."""
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
    """Return notes on images whose class may be another than is meant, and on pictures that are left out."""
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
    """Return notes on names of classes that differ in case alone.

    Raises:
        DataError: two names that are the same to a reader: they differ in spaces around them, or in how accents are encoded.
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
    """Images without labels: a file, or all those in a folder and its subfolders, in sorted order.

    Each is decoded once at the start; those that cannot be are left out, and ``note`` names them.

    Args:
        path, spec, size, pixels: as ``ImageFolder`` takes them.
        pictures: the images, where they are no files of their own.
        all_read: raise an error for an image that cannot be read: each was named.

    Attributes:
        names: of the files, as ``path`` leads to them.
        preprocessing: what is done to an image, with nothing left open.
        note: which files are left out; None where none are.

    Raises:
        DataError: Pillow is missing, no image that can be read, or an input that takes no images, or not these.
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
            DataError: an image that can no longer be read, by its file name.
        """
        return {self._reader.entry.name: self._reader.numbers([self._reader.read(self._files[int(index)]) for index in indices])}

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of each image, as its EXIF orientation turns it."""
        return [upright_size(file) for file in self._files]
