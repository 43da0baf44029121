"""Batches of objects with boxes, padded to the same number of objects in every picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from burnish.data.annotated.images import AnnotatedImages, LeftOut
from burnish.data.data_spec import DataSpec
from burnish.data.image.decoding import UnreadableImage, resized_sides, upright_size
from burnish.data.image.reader import ImageReader
from burnish.data.model_metadata import DataDescription
from burnish.errors import DataError
from burnish.losses.detection import AREAS, BOXES, CROWD, LABELS, PADDING, SIZES
from burnish.program import Entry

LEAST_SIDE = 1e-6
"""Shortest side of a box, as a fraction of the picture. Shorter boxes, such as remains of a crop, are dropped."""


@dataclass(frozen=True)
class Scene:
    """The objects of a picture.

    Attributes:
        file: path of the picture.
        height, width: size in pixels.
        boxes: left, top, right, bottom in pixels, float64 ``[M, 4]``.
        labels: class indices, int64 ``[M]``.
        crowd: True for a region of many objects or an object that does not count, bool ``[M]``.
        areas: areas in pixels, float64 ``[M]``.
    """

    file: Path
    height: int
    width: int
    boxes: np.ndarray
    labels: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray

    def only(self, kept: np.ndarray) -> Scene:
        """Return the scene with only some of its objects."""
        return replace(self, boxes=self.boxes[kept], labels=self.labels[kept], crowd=self.crowd[kept], areas=self.areas[kept])


class ObjectImages(AnnotatedImages):
    """Images with objects, for detection losses: ``labels``, ``boxes``, and the further inputs of ``crowd=true``.

    Boxes are fractions of the cropped and flipped image. All batches are padded to the largest number of objects in a picture.

    Args:
        scenes: the annotated pictures.
        classes: class names by index.
        spec: inputs of the program.
        size, pixels: see ``open_dataset``.
        source: name for errors.
        notes: remarks for the user.

    Raises:
        DataError: not a detection loss, too many classes for the model, or no picture is left.
    """

    def __init__(
        self,
        scenes: Sequence[Scene],
        classes: Sequence[str],
        spec: DataSpec,
        reader: ImageReader,
        source: str,
        notes: Sequence[str] = (),
    ):
        self._entries = object_entries(spec, source)
        self.classes = tuple(classes)
        most = self._entries[LABELS].maximum
        if most is not None and len(self.classes) > most + 1:
            raise DataError(
                f"{source}: {len(self.classes)} classes ({self.classes[0]} ... {self.classes[-1]}), and the model has "
                f"{most + 1}; take a model with as many scores as there are classes"
            )
        notes, readable = list(notes), LeftOut("pictures")
        readable.total = len(scenes)
        usable = [scene for scene in scenes if _is_usable(scene, readable)]
        notes += readable.notes()
        crowds = sum(int(scene.crowd.sum()) for scene in usable)
        if crowds and CROWD not in self._entries:
            notes.append(f"{crowds:,} objects are regions of many, or do not count, and are left out (the loss takes crowd=true)")
            usable = [scene.only(~scene.crowd) for scene in usable]
        self._scenes = usable
        self._places = max((len(scene.labels) for scene in usable), default=0) or 1
        super().__init__([scene.file for scene in usable], reader, source, notes)

    def sample_classes(self, label: Entry | None) -> tuple[np.ndarray, str] | None:
        """Return the rarest class in each picture, for a split that keeps every class in the training part; -1 if it has no
        object.
        """
        counts = self._pictures_with()
        rarest = [min(scene.labels.tolist(), key=lambda label: (counts[label], label), default=-1) for scene in self._scenes]
        return np.asarray(rarest, np.int64), "the rarest class in a picture"

    def part(self, indices: np.ndarray, like: DataDescription | None = None) -> Self:
        part = super().part(indices, like)
        gone = np.flatnonzero((part._pictures_with() == 0) & (self._pictures_with() > 0))
        if like is None and gone.size:
            raise DataError(
                f"{self._source}: eval_split would hold out all pictures of the class '{self.classes[gone[0]]}': hold "
                "out less, take another seed, or give other pictures as eval_data (--eval-data)"
            )
        return part

    def _pictures_with(self) -> np.ndarray:
        """Return the number of pictures that have each class, int64 [classes]."""
        held = [np.unique(scene.labels) for scene in self._scenes]
        return np.bincount(np.concatenate([*held, np.zeros(0, np.int64)]), minlength=len(self.classes))

    def _select(self, whole: Self, places: Sequence[int]) -> None:
        self._scenes = [whole._scenes[place] for place in places]

    def annotations(self, places: Sequence[int], flipped: np.ndarray) -> dict[str, np.ndarray]:
        """Return labels, boxes and the other inputs of the loss."""
        count = len(places)
        arrays = {
            LABELS: np.full((count, self._places), PADDING),
            BOXES: np.zeros((count, self._places, 4)),
            CROWD: np.zeros((count, self._places), np.int64),
            AREAS: np.zeros((count, self._places)),
            SIZES: np.ones((count, 2)),
        }
        for row, (place, flip) in enumerate(zip(places, flipped, strict=True)):
            scene = self._scenes[place]
            boxes = self._boxes(scene)
            if flip:
                boxes = np.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], axis=1)
            kept = np.flatnonzero(((boxes[:, 2:] - boxes[:, :2]) > LEAST_SIDE).all(axis=1))
            own = slice(0, len(kept))
            arrays[LABELS][row, own], arrays[BOXES][row, own] = scene.labels[kept], boxes[kept]
            arrays[CROWD][row, own], arrays[AREAS][row, own] = scene.crowd[kept], scene.areas[kept]
            arrays[SIZES][row] = scene.height, scene.width
        return {name: arrays[name].astype(entry.numpy_dtype) for name, entry in self._entries.items()}

    def _boxes(self, scene: Scene) -> np.ndarray:
        """Return boxes as fractions of the image that the model sees."""
        fractions = scene.boxes / [scene.width, scene.height, scene.width, scene.height]
        sides, corner = resized_sides(scene.width, scene.height, self.preprocessing)
        if corner is not None:
            assert self.preprocessing.size is not None
            height, width = self.preprocessing.size
            fractions = (fractions * [*sides, *sides] - [*corner, *corner]) / [width, height, width, height]
        return np.clip(fractions, 0.0, 1.0)


def object_entries(spec: DataSpec, source: str) -> dict[str, Entry]:
    """Return the inputs of a detection loss, by name.

    Raises:
        DataError: the loss is not a detection loss.
    """
    entries = {entry.name: entry for entry in (spec.label, *spec.further_labels) if entry is not None}
    if not {LABELS, BOXES} <= entries.keys() or not entries.keys() <= {LABELS, BOXES, CROWD, AREAS, SIZES}:
        listed = ", ".join(map(repr, entries)) or "nothing"
        raise DataError(
            f"{source}: these data hold objects with boxes, and the loss compares with {listed}: use a loss of detectors, such "
            "as ssd, task_aligned or detr (--loss)"
        )
    return entries


def _is_usable(scene: Scene, left_out: LeftOut) -> bool:
    """True if a picture's header is readable and has the annotated size."""
    if not scene.file.is_file():
        left_out.add("their files are missing", scene.file)
        return False
    try:
        width, height = upright_size(scene.file)
    except UnreadableImage as error:
        left_out.add("they cannot be read", error.what)
        return False
    if (width, height) != (scene.width, scene.height):
        left_out.add("their sizes are not those of the annotations", f"{scene.file} ({width} x {height})")
        return False
    return True


def scene_of(
    file: Path, size: tuple[int, int], objects: Sequence[tuple[str, Sequence[float], int, bool, float | None]], left_out: LeftOut
) -> Scene:
    """Return a picture with its objects. Boxes are clipped to the picture; those without an area are left out.

    Args:
        file: path of the picture.
        size: height and width.
        objects: for each its name for messages, two corners in pixels, class index, True if it does not count, and area (None:
            that of the box).
        left_out: counter of unusable objects.
    """
    height, width = size
    boxes, labels, crowd, areas = [], [], [], []
    for name, box, label, does_not_count, area in objects:
        left_out.total += 1
        if len(box) != 4 or not np.isfinite(box).all():
            left_out.add("their boxes are not four numbers", name)
            continue
        left, top, right, bottom = np.clip(np.asarray(box, np.float64), 0, [width, height, width, height])
        if right <= left or bottom <= top:
            left_out.add("their boxes have no area in the picture", name)
            continue
        boxes.append((left, top, right, bottom))
        labels.append(label)
        crowd.append(does_not_count)
        areas.append((right - left) * (bottom - top) if area is None else area)
    return Scene(
        file,
        height,
        width,
        np.asarray(boxes, np.float64).reshape(-1, 4),
        np.asarray(labels, np.int64),
        np.asarray(crowd, bool),
        np.asarray(areas, np.float64),
    )


def class_names(names: Sequence[str], spec: DataSpec, classes: Sequence[str] | None, source: str) -> tuple[str, ...]:
    """Return the classes by index: ``classes`` if given, the model's own, or those of the data.

    Raises:
        DataError: the data have a class that is not trained.
    """
    chosen = tuple(classes) if classes is not None else spec.class_order(names)
    trained = set(chosen)
    for name in names:
        if name not in trained:
            raise DataError(
                f"{source}: class '{name}' is not among the classes that are trained: {', '.join(chosen)}; remove its objects, "
                "or add the class to the training data"
            )
    return chosen
