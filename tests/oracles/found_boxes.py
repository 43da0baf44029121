"""What a detector might have found in random pictures, and what COCO's own code says of it.

``RECORDED`` is what pycocotools 2.0.11 gives of ``pictures(seed)``, written as instances and results of pictures of their sizes
in pixels; ``python found_boxes.py`` in an environment with pycocotools prints it.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

CLASSES = 3
SEEDS = (0, 1)
RECORDED = {
    0: {
        "all": 0.14333318964246533,
        "0.5": 0.34456651805531424,
        "0.75": 0.08312177371583311,
        "small": 0.23093666509508093,
        "medium": 0.1381925692569257,
        "large": 0.2666666666666666,
    },
    1: {
        "all": 0.14122948067222288,
        "0.5": 0.40293899512582254,
        "0.75": 0.03620101505948914,
        "small": 0.1753137374176978,
        "medium": 0.13637315892761437,
        "large": 0.39999999999999997,
    },
}


def pictures(seed: int, count: int = 12) -> list[dict[str, Any]]:
    """Objects, some of them regions of many, and boxes near them, near nothing, and twice; in pixels, two corners."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        height, width = (int(side) for side in rng.integers(120, 400, 2))
        objects = int(rng.integers(0, 7)) if number else 0
        size = np.exp(rng.uniform(np.log(8), np.log(min(height, width) * 0.9), (objects, 2)))
        corner = rng.uniform(0, 1, (objects, 2)) * (np.array([width, height]) - size).clip(0)
        boxes = np.concatenate([corner, corner + size], 1)
        labels = rng.integers(0, CLASSES, objects)
        near = (
            np.repeat(boxes, 2, axis=0)
            + rng.normal(size=(2 * objects, 4)) * np.repeat(size, 2, axis=0).mean(1, keepdims=True) * 0.12
        )
        low, high = np.minimum(near[:, :2], near[:, 2:]), np.maximum(near[:, :2], near[:, 2:])
        stray = rng.uniform(0, 60, (4, 2))
        found = np.concatenate([np.concatenate([low, high], 1), np.concatenate([stray, stray + rng.uniform(5, 90, (4, 2))], 1)])
        classes = np.concatenate([np.repeat(labels, 2), rng.integers(0, CLASSES, 4)])
        wrong = rng.random(len(classes)) < 0.15
        made.append(
            {
                "size": (height, width),
                "labels": labels,
                "boxes": boxes,
                "crowd": rng.random(objects) < 0.2,
                "areas": size.prod(1) * rng.uniform(0.4, 1.0, objects),
                "scores": np.round(rng.random(len(classes)), 2),
                "classes": np.where(wrong, (classes + 1) % CLASSES, classes),
                "found": found,
            }
        )
    return made


def by_pycocotools(seed: int) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def wide(box: np.ndarray) -> list[float]:
        return [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]

    made = pictures(seed)
    annotations, results = [], []
    for number, picture in enumerate(made):
        for label, box, crowd, area in zip(*(picture[name] for name in ("labels", "boxes", "crowd", "areas")), strict=True):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(label),
                    "bbox": wide(box),
                    "area": float(area),
                    "iscrowd": int(crowd),
                }
            )
        for score, label, box in zip(picture["scores"], picture["classes"], picture["found"], strict=True):
            results.append({"image_id": number, "category_id": int(label), "bbox": wide(box), "score": float(score)})
    images = [{"id": number, "height": one["size"][0], "width": one["size"][1]} for number, one in enumerate(made)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number} for number in range(CLASSES)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = ("all", "0.5", "0.75", "small", "medium", "large")
    return dict(zip(names, map(float, evaluation.stats), strict=False))


if __name__ == "__main__":
    for each in SEEDS:
        print(f"    {each}: {by_pycocotools(each)},")
