"""Random changes to a training batch that keep its labels."""

from __future__ import annotations

import numpy as np

from burnish.data.loader import Augmentation


def shift_images(name: str, pixels: int = 1) -> Augmentation:
    """Return an augmentation that moves every image by up to ``pixels`` in height and in width; zeros move in.

    Args:
        name: the input that holds the images, [batch, channels, height, width].
        pixels: the largest shift; each of the 2 * pixels + 1 shifts along an axis is equally likely.
    """

    def augment(batch: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        images = batch[name]
        count, _, height, width = images.shape
        padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        down, right = generator.integers(0, 2 * pixels + 1, (2, count))
        return {**batch, name: np.ascontiguousarray(windows[np.arange(count), :, down, right])}

    return augment
