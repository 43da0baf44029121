"""Pictures of rectangles and circles on noise, drawn by a seed, as folders of COCO, PASCAL VOC, and of masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

NAMES = ("rectangle", "circle")


class Shapes(NamedTuple):
    """A picture, uint8 [side, side, 3]; boxes in pixels, two corners; class indices; and the class of each pixel, 0 for none."""

    pixels: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    mask: np.ndarray


def draw(rng: np.random.Generator, side: int = 32, most: int = 2) -> Shapes:
    """One or more shapes that do not touch, brighter than the noise around them."""
    pixels = rng.integers(0, 90, (side, side, 3))
    mask = np.zeros((side, side), np.uint8)
    boxes, labels = [], []
    y, x = np.mgrid[:side, :side]
    for _ in range(int(rng.integers(1, most + 1))):
        for _ in range(20):
            size = int(rng.integers(side // 4, side // 2))
            left, top = (int(one) for one in rng.integers(0, side - size, 2))
            if not mask[top : top + size, left : left + size].any():
                break
        else:
            continue
        label = int(rng.integers(0, 2))
        inside = (x >= left) & (x < left + size) & (y >= top) & (y < top + size)
        if label:
            inside &= (x + 0.5 - left - size / 2) ** 2 + (y + 0.5 - top - size / 2) ** 2 <= (size / 2) ** 2
        mask[inside] = label + 1
        pixels[inside] = rng.integers(150, 255, 3)
        boxes.append([left, top, left + size, top + size])
        labels.append(label)
    return Shapes(pixels.astype(np.uint8), np.asarray(boxes, float).reshape(-1, 4), np.asarray(labels), mask)


def drawn(count: int, seed: int, side: int = 32, most: int = 2) -> list[Shapes]:
    rng = np.random.default_rng(seed)
    return [draw(rng, side, most) for _ in range(count)]


def write_coco(folder: Path, shapes: list[Shapes], split: str = "train") -> Path:
    """``annotations/instances_<split>.json`` and the pictures in ``<split>``; returns the folder."""
    (folder / split).mkdir(parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    images, annotations = [], []
    for number, one in enumerate(shapes):
        name = f"{number:04}.png"
        Image.fromarray(one.pixels).save(folder / split / name)
        height, width = one.pixels.shape[:2]
        images.append({"id": number + 10, "file_name": name, "height": height, "width": width})
        for box, label in zip(one.boxes.tolist(), one.labels.tolist(), strict=True):
            wide = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number + 10,
                    "category_id": 3 * label + 1,
                    "bbox": wide,
                    "area": wide[2] * wide[3],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": 3 * index + 1, "name": name} for index, name in enumerate(NAMES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_voc(folder: Path, shapes: list[Shapes]) -> Path:
    """``Annotations``, ``JPEGImages`` (of PNG files) and a list of the first half; returns the folder."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for number, one in enumerate(shapes):
        name = f"{number:04}"
        Image.fromarray(one.pixels).save(folder / "JPEGImages" / f"{name}.png")
        objects = "".join(
            f"<object><name>{NAMES[label]}</name><difficult>{number % 2}</difficult><bndbox><xmin>{box[0] + 1}</xmin>"
            f"<ymin>{box[1] + 1}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
            for box, label in zip(one.boxes.astype(int).tolist(), one.labels.tolist(), strict=True)
        )
        height, width = one.pixels.shape[:2]
        text = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        (folder / "Annotations" / f"{name}.xml").write_text(
            f"<annotation><filename>{name}.png</filename>{text}{objects}</annotation>", encoding="utf-8"
        )
    names = [f"{number:04}" for number in range(len(shapes) // 2)]
    (folder / "ImageSets" / "Main" / "train.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    return folder


def write_masks(folder: Path, shapes: list[Shapes]) -> Path:
    """``images`` and ``masks``, a palette in the first and gray in the others; returns the folder."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number, one in enumerate(shapes):
        Image.fromarray(one.pixels).save(folder / "images" / f"{number:04}.png")
        mask = Image.fromarray(one.mask)
        if not number:
            mask = mask.convert("P")
            mask.putdata(one.mask.reshape(-1).tolist())
        mask.save(folder / "masks" / f"{number:04}.png")
    return folder
