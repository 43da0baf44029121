"""Objects in COCO format: one JSON file of instances and the pictures it names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.annotated.images import LeftOut, file_within
from burnish.data.annotated.objects import ObjectImages, class_names, object_entries, scene_of
from burnish.data.data_spec import DataSpec
from burnish.data.image.reader import ImageReader, reader_for, some_of
from burnish.data.preprocessing import PixelsLike
from burnish.errors import DataError
from burnish.untrusted_files import read_json_file
from burnish.validation import is_whole

PATTERNS = ("annotations/instances*.json", "instances*.json", "_annotations.coco.json", "annotations.json", "annotations/*.json")
NUMBERS = ("bbox", "height", "width")
"""Keys with numbers; the others are ids and names."""
LARGEST_FILE = 1 << 30
"""Largest instances file, in bytes. The file of COCO's training set takes 450 MB."""


def instance_files(folder: Path) -> list[Path]:
    """Return the instances files in a folder that match the first pattern with any match."""
    return next((found for pattern in PATTERNS if (found := sorted(folder.glob(pattern)))), [])


def open_coco(
    path: Path,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    pixels: PixelsLike | None = None,
) -> ObjectImages:
    """Return the pictures and objects of a COCO file.

    Classes are numbered in the order of their ids. Pictures are searched in the dataset folder and next to the file: by name, in
    ``images``, and in a folder named like the file without ``instances_``. Unusable annotations are counted and left out.

    Args:
        path: the JSON file, or a folder with one in it or in ``annotations``.
        spec, classes, size, pixels: see ``open_dataset``.

    Raises:
        DataError: there is no such file or several; it is damaged, too large or names files outside the folder; or the data do
            not fit the program.
    """
    file = _file_of(path)
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    object_entries(spec, str(path))
    reader: ImageReader = reader_for(spec, str(path), size, pixels)
    content = _read(file)
    # Ids are numbers or texts; padding with zeros sorts both by their number.
    categories = sorted(_records(content, "categories", file, ("id", "name")), key=lambda one: str(one["id"]).zfill(20))
    names = [str(one["name"]) for one in categories]
    if len(set(names)) < len(names):
        raise DataError(f"{file}: two of its categories have one name: {some_of(names)}; give each a name of its own")
    chosen = class_names(names, spec, classes, str(path))
    place = {name: index for index, name in enumerate(chosen)}
    index = {one["id"]: place[str(one["name"])] for one in categories}
    left_out = LeftOut("objects")
    pictures = {one["id"]: one for one in _records(content, "images", file, ("id", "file_name", "height", "width"))}
    objects: dict[Any, list[Any]] = {number: [] for number in pictures}
    for number, one in enumerate(_records(content, "annotations", file, ("image_id", "category_id", "bbox"))):
        name = f"{one.get('id', number)}"
        box, crowd, area = _corners(one["bbox"]), one.get("iscrowd") or 0, one.get("area")
        reason = (
            "their pictures or categories are not in the file"
            if one["image_id"] not in objects or one["category_id"] not in index
            else "their 'iscrowd' is neither 0 nor 1"
            if crowd not in (0, 1)
            else "their areas are not numbers that float32 holds, from 0"
            if area is not None and not (_is_held(area) and area >= 0)
            else None
        )
        if reason is not None:
            left_out.total += 1
            left_out.add(reason, name)
            continue
        objects[one["image_id"]].append((name, box, index[one["category_id"]], bool(crowd), area))
    scenes = []
    for number, one in pictures.items():
        sides = one["height"], one["width"]
        if not all(is_whole(side) and side > 0 for side in sides):
            raise DataError(f"{file}: the picture '{one['file_name']}' has the size {sides}: give height and width in pixels")
        scenes.append(scene_of(_picture(root, file, str(one["file_name"])), sides, objects[number], left_out))
    return ObjectImages(scenes, chosen, spec, reader, str(path), left_out.notes())


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    files = instance_files(path)
    if len(files) != 1:
        listed = ", ".join(str(file) for file in files) or "none"
        raise DataError(f"{path}: a COCO folder has one file of instances, and this has {listed}: name the file itself")
    return files[0]


def _read(file: Path) -> Mapping[str, Any]:
    size = file.stat().st_size
    if size > LARGEST_FILE:
        raise DataError(f"{file}: {size:,} bytes, and files of instances are read up to {LARGEST_FILE:,}: split it")
    try:
        content = read_json_file(file, LARGEST_FILE)
    except ValueError as error:
        raise DataError(f"{file}: damaged, or no JSON ({error}); export it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: it holds a {type(content).__name__}, and COCO's instances are an object: export it again")
    return content


def _records(content: Mapping[str, Any], key: str, file: Path, needed: Sequence[str]) -> list[Mapping[str, Any]]:
    records = content.get(key)
    if not isinstance(records, list):
        raise DataError(f"{file}: no list '{key}'; COCO's instances have images, annotations and categories")
    for number, record in enumerate(records):
        lacks = [name for name in needed if not isinstance(record, dict) or name not in record]
        if lacks:
            raise DataError(f"{file}: number {number} of '{key}' has no '{lacks[0]}'; COCO's have {', '.join(needed)}")
        for name in needed:
            if name not in NUMBERS and not _is_name(record[name]):
                raise DataError(
                    f"{file}: '{name}' of number {number} of '{key}' is {_shown(record[name])}, and a whole number or a text is "
                    "expected; export it again"
                )
    if "id" in needed and records:
        (number, count), *_ = Counter(record["id"] for record in records).most_common(1)
        if count > 1:
            raise DataError(f"{file}: {count} of '{key}' have the id {number!r}; give each an id of its own")
    return records


def _is_name(value: Any) -> bool:
    return is_whole(value) or isinstance(value, str)


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else json.dumps(value)


def _is_held(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float(np.finfo(np.float32).max)


def _corners(box: Any) -> tuple[float, ...]:
    """Return left, top, right, bottom of a box ``[left, top, width, height]``; empty if it is no such box."""
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_held, box)):
        return ()
    left, top, width, height = (float(side) for side in box)
    return left, top, left + width, top + height


def _picture(root: Path, file: Path, name: str) -> Path:
    split = file.stem.removeprefix("instances_")
    within = [file_within(root, f"{folder}{name}", str(file)) for folder in ("", "images/", f"{split}/", f"images/{split}/")]
    if file.parent != root:
        within.append(file_within(root, f"{file.parent.name}/{name}", str(file)))
    return next((picture for picture in within if picture.is_file()), within[0])
