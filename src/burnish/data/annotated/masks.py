"""Pairs of pictures and masks for semantic segmentation. Each mask pixel holds a class index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from burnish.data.annotated import voc
from burnish.data.annotated.images import AnnotatedImages, LeftOut
from burnish.data.data_spec import DataSpec
from burnish.data.image.decoding import (
    LOSSY,
    UnreadableImage,
    check_memory,
    opened,
    resized_sides,
    turn_of,
    upright_sides,
    upright_size,
)
from burnish.data.image.reader import SUFFIXES, image_files, reader_for
from burnish.data.preprocessing import PixelsLike
from burnish.errors import DataError
from burnish.program import Entry

if TYPE_CHECKING:
    from PIL import Image

PICTURES, MASKS = "images", "masks"
MODES = ("L", "P", "1")
"""Pillow modes of masks: gray, palette and 1 bit."""
STRETCHED = ("L;2", "L;4")
"""Raw modes of 2- and 4-bit gray, which Pillow scales: class 1 becomes 85 and 17."""
VOID = 255
"""Pixel value for "no class", as in VOC and Cityscapes."""


def is_masks(path: Path) -> bool:
    """True if a folder has pictures and masks."""
    return (path / PICTURES).is_dir() and (path / MASKS).is_dir()


def is_of_positions(spec: DataSpec) -> bool:
    """True if the loss takes a single label array with one entry for each pixel."""
    return spec.label is not None and not spec.further_labels and len(spec.label.extents) in (3, 4)


class MaskImages(AnnotatedImages):
    """Pictures in ``images`` and masks of the same names in ``masks``, with one channel of class indices or a palette.

    Masks are resized (nearest neighbor) to the labels' shape and get the center crop and flip of their pictures. 255 becomes the
    loss's ``ignore_index``. For a binary loss every value above 0 is positive, 255 only if no mask has another. Unusable pairs
    are counted and left out.

    Args:
        path: the folder, a VOC folder, or a list of its pictures; VOC masks are in ``SegmentationClass``.
        spec: inputs of the program.
        size, pixels: see ``open_dataset``.

    Raises:
        DataError: no pair is usable, the loss does not take a class per pixel, masks have only 0 and 255 and the loss takes
            classes; in ``batch``, the model lacks a class.
    """

    def __init__(self, path: Path, spec: DataSpec, size: tuple[int, int] | None = None, pixels: PixelsLike | None = None):
        label = spec.only_label(str(path))
        self._label = label
        rank = len(label.extents)
        if rank != (4 if label.dtype.is_floating_point() else 3) or (rank == 4 and label.extents[1] != 1):
            raise DataError(
                f"{path}: masks give a class to each pixel, [batch, height, width], and the loss compares with '{label.name}' of "
                f"shape {list(label.extents)}: use a loss of positions, such as cross_entropy or dice, on an output "
                "[batch, classes, height, width]"
            )
        reader = reader_for(spec, str(path), size, pixels)
        left_out = LeftOut("pictures")
        pairs = _pairs(path, left_out)
        self._masks = [mask for _, mask in pairs]
        self._has_void = not _hold_void_alone(self._masks)
        if rank == 3 and not self._has_void:
            raise DataError(
                f"{path}: the masks hold 0 and {VOID} alone, and {VOID} is a pixel that has no class: nothing can be told apart; "
                f"write 1 in its place; or give a model with one channel a loss of yes or no, for which {VOID} is a yes "
                "(loss='bce_with_logits', --loss bce_with_logits)"
            )
        super().__init__([file for file, _ in pairs], reader, str(path), left_out.notes())
        assert self.preprocessing.size is not None
        sides = zip(label.extents[-2:], self.preprocessing.size, strict=True)
        height, width = (extent if isinstance(extent, int) else side for extent, side in sides)
        self._size = height, width

    def _select(self, whole: Self, places: Sequence[int]) -> None:
        self._masks = [whole._masks[place] for place in places]

    def annotations(self, places: Sequence[int], flipped: np.ndarray) -> dict[str, np.ndarray]:
        """Return the class of each pixel."""
        masks = [
            mask[:, ::-1] if flip else mask
            for mask, flip in zip((self._mask(self._masks[place]) for place in places), flipped, strict=True)
        ]
        labels = np.stack(masks)
        if len(self._label.extents) == 4:
            labels = labels[:, None] > 0
        return {self._label.name: labels.astype(self._label.numpy_dtype)}

    def _mask(self, file: Path) -> np.ndarray:
        from PIL import Image

        try:
            with opened(file) as (image, size):
                turn = turn_of(image)
                sides, corner = resized_sides(*upright_sides(image, turn), self.preprocessing)
                check_memory(image, size, image.width * image.height + (0 if corner is None else sides[0] * sides[1]))
                image.load()
                mask: Image.Image = image if turn is None else image.transpose(turn)
                if corner is not None:
                    assert self.preprocessing.size is not None
                    bottom, right = corner[1] + self.preprocessing.size[0], corner[0] + self.preprocessing.size[1]
                    mask = mask.resize(sides, Image.Resampling.NEAREST).crop((*corner, right, bottom))
                values = np.asarray(mask.resize((self._size[1], self._size[0]), Image.Resampling.NEAREST)).astype(np.int64)
        except UnreadableImage as error:
            raise DataError(f"{error} and its picture") from error
        if len(self._label.extents) != 4:
            return _classes(values, self._label, file)
        if self._has_void and (values == VOID).any():
            raise DataError(
                f"{file}: pixels of {VOID} have no class, as other masks hold classes below it, and a loss of yes or no ignores "
                f"none: use cross_entropy or dice on an output of two classes, or write 0 or 1 in place of {VOID}"
            )
        return values


def mask_values(files: Iterable[Path]) -> Iterator[np.ndarray]:
    """Yield the sorted pixel values of each mask; files that are not masks are skipped."""
    for file in files:
        with suppress(UnreadableImage), opened(file) as (image, size):
            if image.mode in MODES and not _is_lossy(image):
                check_memory(image, size, 0)
                # Pillow counts the ones of a 1-bit image at 255.
                values = np.flatnonzero(image.histogram())
                yield np.minimum(values, 1) if image.mode == "1" else values


def _hold_void_alone(files: Sequence[Path]) -> bool:
    """True if the masks have 255 and no other value above 0. Reading stops at the first other class."""
    has_void = False
    for values in mask_values(files):
        if ((values > 0) & (values < VOID)).any():
            return False
        has_void = has_void or bool((values == VOID).any())
    return has_void


def _classes(values: np.ndarray, label: Entry, file: Path) -> np.ndarray:
    """Return class indices, with 255 replaced by the index that the loss ignores."""
    if label.ignored is not None:
        values = np.where(values == VOID, label.ignored, values)
    elif (label.maximum is None or label.maximum < VOID) and (values == VOID).any():
        raise DataError(
            f"{file}: pixels of 255 have no class, and the loss ignores none: use one with ignore_index, such as cross_entropy "
            "or dice, or give these pixels a class of their own"
        )
    wrong = (values < 0) | (values > label.maximum) if label.maximum is not None else values < 0
    if label.ignored is not None:
        wrong &= values != label.ignored
    if wrong.any():
        has = "" if label.maximum is None else f", and the model has {label.maximum + 1}"
        raise DataError(
            f"{file}: it holds the class {values[wrong][0]}{has}; number the classes from 0, and write 255 where there is none"
        )
    return values


def mask_files(path: Path) -> list[Path]:
    """Return the masks of a masks folder, a VOC folder, or a list of VOC pictures."""
    if is_masks(path):
        return image_files(path / MASKS)
    files = image_files(voc.root_of(path) / voc.MASKS)
    listed = None if path.is_dir() else {*voc.listed_names(path)}
    return [file for file in files if listed is None or file.stem in listed]


def _pairs(path: Path, left_out: LeftOut) -> list[tuple[Path, Path]]:
    root, pictures, folder = (path, PICTURES, MASKS) if is_masks(path) else (voc.root_of(path), voc.PICTURES, voc.MASKS)
    masks = {mask.relative_to(root / folder).with_suffix(""): mask for mask in mask_files(path)}
    files = image_files(root / pictures)
    if not files:
        raise DataError(f"{path}: no pictures in '{pictures}'; {', '.join(sorted(SUFFIXES))} files are read, in subfolders too")
    absent: list[str] = []
    if not is_masks(path):  # a VOC folder has many more pictures than masks, and a list selects some
        wanted = [mask.stem for mask in mask_files(path)] if path.is_dir() else voc.listed_names(path)
        absent = sorted({*wanted} - {file.stem for file in files})
        files = [file for file in files if file.stem in {*wanted}]
    left_out.total = len(files) + len(absent)
    for name in absent:
        left_out.add(f"they are not in '{pictures}'", name)
    pairs = []
    for file in files:
        mask = masks.get(file.relative_to(root / pictures).with_suffix(""))
        if mask is None:
            left_out.add("they have no masks", file)
        elif (reason := _misfit(file, mask)) is not None:
            left_out.add("they or their masks cannot be used", reason)
        else:
            pairs.append((file, mask))
    return pairs


def _is_lossy(image: Image.Image) -> bool:
    """True if JPEG changed the pixel values; TIFF files may contain JPEG, too."""
    return image.format in LOSSY or image.info.get("compression") in ("jpeg", "tiff_jpeg")


def _misfit(file: Path, mask: Path) -> str | None:
    """Return the reason why a pair is unusable, from the headers of both files, or None."""
    try:
        size, other = upright_size(file), upright_size(mask)
        with opened(mask) as (image, _):
            mode, is_lossy = image.mode, _is_lossy(image)
            stretched = any(str(tile[3]).strip("('").startswith(STRETCHED) for tile in getattr(image, "tile", ()))
    except UnreadableImage as error:
        return error.what
    if is_lossy:
        return f"{mask} (a JPEG file, which changes the values of pixels, and these are classes: save masks as PNG)"
    if stretched:
        return f"{mask} (gray of less than 8 bits, whose values readers stretch to 255: save masks with 8 bits or a palette)"
    if mode not in MODES:
        return f"{mask} (its pixels are {mode}, and a mask has one channel of 8 bits or a palette)"
    return None if size == other else f"{mask} ({other[0]} x {other[1]}, and the picture {size[0]} x {size[1]})"
