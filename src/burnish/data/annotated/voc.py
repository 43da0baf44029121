"""Objects in PASCAL VOC format: one XML file for each picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.parsers import expat

from burnish.data.annotated.images import LeftOut, file_within
from burnish.data.annotated.objects import ObjectImages, class_names, object_entries, scene_of
from burnish.data.data_spec import DataSpec
from burnish.data.image.reader import reader_for
from burnish.data.preprocessing import PixelsLike
from burnish.errors import DataError
from burnish.settings import read_number, read_whole
from burnish.untrusted_files import UNREADABLE, read_bytes

ANNOTATIONS, PICTURES, SETS, MASKS = "Annotations", "JPEGImages", "ImageSets", "SegmentationClass"
LARGEST_FILE = 1 << 20
"""Largest annotation file, in bytes. VOC's own take a few thousand."""
DEEPEST = 8


class DamagedXml(Exception):
    """An annotation file that is not XML or has unexpected contents."""


def is_voc(path: Path) -> bool:
    """True if a path is a VOC folder, or a list of pictures in one."""
    if path.is_dir():
        return (path / ANNOTATIONS).is_dir() and (path / PICTURES).is_dir()
    return path.suffix == ".txt" and SETS in path.parent.parts and is_voc(root_of(path))


def has_masks(path: Path) -> bool:
    """True if a VOC folder (or the folder of a list) has segmentation masks."""
    return (root_of(path) / MASKS).is_dir()


def open_voc(
    path: Path,
    spec: DataSpec,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    pixels: PixelsLike | None = None,
) -> ObjectImages:
    """Return the pictures and objects of a VOC folder.

    Classes are sorted by name. Coordinates count pixels from 1, inclusively. Objects marked difficult do not count. Unusable
    annotations are counted and left out.

    Args:
        path: the folder, with ``Annotations`` and ``JPEGImages``, or a list in it, such as ``ImageSets/Main/train.txt``.
        spec, classes, size, pixels: see ``open_dataset``.

    Raises:
        DataError: there are no annotations, a file name leads out of the folder, or the data do not fit the program.
    """
    root = root_of(path)
    object_entries(spec, str(path))
    reader = reader_for(spec, str(path), size, pixels)
    files = sorted((root / ANNOTATIONS).glob("*.xml"))
    if not path.is_dir():
        files = [file_within(root / ANNOTATIONS, f"{name}.xml", str(path)) for name in listed_names(path)]
    unreadable, left_out = LeftOut("annotations"), LeftOut("objects")
    unreadable.total = len(files)
    read = []
    for file in files:
        try:
            read.append((file, _read(file)))
        except (DamagedXml, *UNREADABLE) as error:
            unreadable.add("they cannot be read", f"{file.name} ({error})")
    if not read:
        detail = f": {'; '.join(unreadable.notes())}" if files else ""
        raise DataError(f"{path}: no annotations; a VOC folder has an XML file for each picture in '{ANNOTATIONS}'{detail}")
    names = sorted({one["name"] for _, picture in read for one in picture["objects"]})
    chosen = class_names(names, spec, classes, str(path))
    place = {name: index for index, name in enumerate(chosen)}
    scenes = []
    for file, picture in read:
        objects = [
            (f"{one['name']} in {file.name}", one["box"], place[one["name"]], one["difficult"], None)
            for one in picture["objects"]
        ]
        name = picture["filename"] or f"{file.stem}.jpg"
        scenes.append(scene_of(file_within(root / PICTURES, name, str(file)), picture["size"], objects, left_out))
    return ObjectImages(scenes, chosen, spec, reader, str(path), [*unreadable.notes(), *left_out.notes()])


def listed_names(path: Path) -> list[str]:
    """Return the picture names in a list. A class list (``cat_train.txt``) yields only pictures that show the class."""
    try:
        lines = read_bytes(path).decode("utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{path}: no list of pictures in UTF-8 ({error}); write it again") from error
    words = (line.split() for line in lines)
    return [line[0] for line in words if line and line[-1] != "-1"]


def root_of(path: Path) -> Path:
    """Return the VOC folder of a path, which may be a list in it."""
    if path.is_dir():
        return path
    parts = path.parts
    place = len(parts) - 1 - parts[::-1].index(SETS)
    return Path(*parts[:place]) if place else Path(".")


def _read(file: Path) -> dict[str, Any]:
    root = _elements(read_bytes(file, LARGEST_FILE))
    try:
        height, width = (read_whole(_one(root, "size", side)) for side in ("height", "width"))
        if height < 1 or width < 1:
            raise DamagedXml(f"the size is {width} x {height}")
        objects = [_object(one) for one in root.get("object", [])]
        filename = _one(root, "filename") if "filename" in root else ""
    except UNREADABLE as error:
        raise DamagedXml(f"an element is missing, or no number: {error}") from error
    return {"filename": filename, "size": (height, width), "objects": objects}


def _one(element: dict[str, Any], *path: str) -> str:
    """Return the text at the end of a path of elements. Each element may occur once."""
    found: Any = [element]
    for name in path:
        found = found[0][name]
        if len(found) > 1:
            raise DamagedXml(f"it has '{name}' {len(found)} times, and one is expected")
    if not isinstance(found[0], str):
        raise KeyError(path[-1])
    return found[0]


def _object(element: dict[str, Any]) -> dict[str, Any]:
    box = [read_number(_one(element, "bndbox", side)) for side in ("xmin", "ymin", "xmax", "ymax")]
    difficult = _one(element, "difficult") if "difficult" in element else "0"
    is_number = all(math.isfinite(side) for side in box)
    corners = (box[0] - 1, box[1] - 1, box[2], box[3]) if is_number else ()
    if difficult not in ("", "0", "1"):
        raise DamagedXml(f"'difficult' is '{difficult}', and 0 or 1 is expected")
    return {"name": _one(element, "name"), "box": corners, "difficult": difficult == "1"}


def _elements(content: bytes) -> dict[str, Any]:
    """Return the elements of an XML document: name -> texts, or nested elements.

    Document types are refused, and with them all entities, which could read other files or grow without limit.
    """
    root: dict[str, Any] = {}
    stack: list[tuple[str, dict[str, Any], list[str]]] = [("", root, [])]
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(stack) > DEEPEST:
            raise DamagedXml(f"elements are nested deeper than {DEEPEST}")
        stack.append((name, {}, []))

    def end(name: str) -> None:
        _, children, text = stack.pop()
        stack[-1][1].setdefault(name, []).append(children or "".join(text).strip())

    def refuse(*_: Any) -> None:
        raise DamagedXml("it declares a document type, which annotations do not have")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = lambda text: stack[-1][2].append(text)
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # ValueError and LookupError: the XML names an unknown encoding
        raise DamagedXml(f"no XML: {error}") from error
    top: Any = next(iter(root.values()))[0]
    if not isinstance(top, dict):
        raise DamagedXml("it holds no elements")
    return top
