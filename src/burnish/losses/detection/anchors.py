"""Where the predictions of a detector lie in a picture: default boxes of several sizes, or the centres of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from burnish.errors import ConfigurationError
from burnish.settings import is_number, is_whole

Grids = tuple[tuple[int, int], ...]


def check_grids(loss: str, grids: Any) -> Grids:
    """Return height and width of each feature map.

    Raises:
        ConfigurationError: they are no pairs of whole numbers above 0.
    """
    pairs = list(grids) if isinstance(grids, Sequence) and not isinstance(grids, str) else []
    sides = [tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else (pair, pair) for pair in pairs]
    if not sides or not all(len(pair) == 2 and all(is_whole(side) and side > 0 for side in pair) for pair in sides):
        raise ConfigurationError(
            f"{loss}: grids are the height and the width of each feature map, in the order of the predictions, such as "
            f"[[38, 38], [19, 19]], not {grids!r}"
        )
    return tuple((int(height), int(width)) for height, width in sides)


def check_numbers(loss: str, option: str, numbers: Any, count: int) -> tuple[float, ...]:
    """Return ``count`` numbers above 0.

    Raises:
        ConfigurationError: they are something else.
    """
    values = tuple(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else ()
    if len(values) != count or not all(is_number(value) and value > 0 for value in values):
        raise ConfigurationError(f"{loss}: {option} must be {count} numbers above 0, not {numbers!r}")
    return tuple(float(value) for value in values)


def default_boxes(grids: Grids, scales: Sequence[float], ratios: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the default boxes of SSD (Liu et al. 2016), ``[A, 4]``: centre and size as fractions, float64.

    Map k has in each cell, row after row: a square of ``scales[k]``, one of ``sqrt(scales[k] * scales[k + 1])``, and for each
    ratio a of ``ratios[k]`` a box of ``scale * sqrt(a)`` by ``scale / sqrt(a)`` and one upright. Sizes are cut off at 1. That is
    the order of torchvision's ``DefaultBoxGenerator``.

    Args:
        grids: height and width of each map.
        scales: one for each map, and one more for the squares of the last.
        ratios: for each map, those above 1.
    """
    boxes = []
    for (height, width), scale, following, shapes in zip(grids, scales[:-1], scales[1:], ratios, strict=True):
        sizes = [(scale, scale), (math.sqrt(scale * following),) * 2]
        for ratio in shapes:
            wide = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            sizes += [wide, wide[::-1]]
        y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
        centres = np.stack([x, y], axis=-1).reshape(-1, 1, 2).repeat(len(sizes), axis=1)
        shaped = np.clip(np.asarray(sizes), 0, 1)[None].repeat(height * width, axis=0)
        boxes.append(np.concatenate([centres, shaped], axis=2).reshape(-1, 4))
    return np.concatenate(boxes)


def cell_centres(grids: Grids) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres of all cells and the size of each, in cells of the first map: ``[A, 2]``, x and y, float64."""
    points, sizes = [], []
    for height, width in grids:
        size = np.asarray([grids[0][1] / width, grids[0][0] / height])
        y, x = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
        points.append(np.stack([x, y], axis=-1).reshape(-1, 2) * size)
        sizes.append(np.broadcast_to(size, (height * width, 2)))
    return np.concatenate(points), np.concatenate(sizes)
