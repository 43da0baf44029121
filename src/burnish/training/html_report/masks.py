"""What a model of segmentation says of each pixel: the confusion matrix of pixels, and the pictures that it gets most wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GAP = 2
"""Columns between the parts of a picture."""


def is_of_pixels(outputs: np.ndarray, labels: np.ndarray) -> bool:
    """Whether scores are of classes for each pixel, [samples, classes, height, width], and labels are masks of indices."""
    return outputs.ndim == 4 and labels.ndim == 3 and labels.dtype.kind in "iu" and outputs.shape[1] > 1


def no_and_yes(scores: np.ndarray, least: float) -> np.ndarray:
    """Return scores of two classes, no and yes, of one score that is a yes above ``least``: [samples, 2, height, width]."""
    return np.concatenate([np.full_like(scores, least), scores], axis=1)


def compared(said: np.ndarray, right: np.ndarray, classes: int) -> np.ndarray:
    """Return how many pixels of which class are taken for which: int64, [right class, class that is said].

    Pixels whose right class is none of them count as little as in the loss: not at all.
    """
    counts = (right >= 0) & (right < classes)
    pairs = right[counts].astype(np.int64) * classes + said[counts].astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def most_mixed_up(matrix: np.ndarray) -> tuple[int, int, float]:
    """Return the pair of classes, right and said, that most wrong pixels are of, and which share of all pixels is wrong."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    right, said = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return int(right), int(said), float(wrong.sum() / max(matrix.sum(), 1))


def side_by_side(picture: np.ndarray | None, masks: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return a picture and masks beside each other, uint8 [height, width, 3].

    Args:
        picture: uint8, [height, width] or [height, width, 3], of the size of the masks; None, or of another size: left out.
        masks: class indices, [height, width] each; what is no class is black.
        classes: how many there are.
    """
    colours = class_colours(classes)
    parts = [colours[np.where((mask >= 0) & (mask < classes), mask, classes)] for mask in masks]
    if picture is not None and picture.shape[:2] == parts[0].shape[:2]:
        parts.insert(0, picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2))
    return joined(parts)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return pictures of one height beside each other: uint8 [height, width, 3]."""
    gap = np.full((parts[0].shape[0], GAP, 3), 255, np.uint8)
    return np.concatenate([piece for part in parts for piece in (part, gap)][:-1], axis=1)


def class_colours(classes: int) -> np.ndarray:
    """A colour for each class, evenly around the wheel, the first dark gray; black behind them: uint8, [classes + 1, 3]."""
    hues = np.arange(max(classes - 1, 1)) / max(classes - 1, 1)
    # Of full saturation and value (Smith 1978): each channel is a trapezoid over the hue.
    shifted = (hues[:, None] * 6 + np.array([0.0, 4.0, 2.0])) % 6
    wheel = np.clip(np.abs(shifted - 3) - 1, 0, 1)[: classes - 1]
    return (np.concatenate([[[0.25] * 3], wheel, [[0.0] * 3]]) * 255).astype(np.uint8)
