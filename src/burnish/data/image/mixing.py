"""MixUp and CutMix: the images of a batch are mixed with others of it, and their targets by the same share."""

from __future__ import annotations

import math

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.image.augmentation import ImageAugmentation
from burnish.data.loader import Augmentation
from burnish.data.preprocessing import image_layout
from burnish.errors import ConfigurationError


def mixing(augmentation: ImageAugmentation, spec: DataSpec) -> Augmentation:
    """Return what mixes the batches of a ``Loader``; each image with the one before it in the batch.

    Both are drawn on the host from the loader's seed, epoch and batch, so that every engine and runtime trains on the same
    numbers.

    Args:
        augmentation: with an alpha for one or both.
        spec: what the program takes: one input of images, and targets of probabilities [batch, classes].

    Raises:
        ConfigurationError: the loss compares with class indices, which cannot be mixed.
        DataError: the model's input is not that of images.
    """
    entry, label = spec.only_data("data"), spec.only_label("data")
    if not is_probabilities(spec):
        raise ConfigurationError(
            f"augment: mixup and cutmix mix the targets of images, and the loss compares '{label.name}' with classes or values: "
            "take cross_entropy:probabilities=true (--loss cross_entropy:probabilities=true), or mix in the graph "
            "(burnish.losses.mixed, --loss mixed:loss=cross_entropy,mixup=0.2)"
        )
    layout = image_layout(entry, "augment")[0]
    height, width = (2, 3) if layout == "NCHW" else (1, 2)

    def augment(batch: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
        images, targets = batch[entry.name], batch[label.name]
        others, cuts = np.roll(images, 1, axis=0), augmentation.cutmix > 0
        if cuts and augmentation.mixup > 0:
            cuts = bool(generator.random() < 0.5)
        alpha = augmentation.cutmix if cuts else augmentation.mixup
        share = float(generator.beta(alpha, alpha))
        if cuts:
            down, across = cut(images.shape[height], images.shape[width], share, generator)
            place = [slice(None)] * images.ndim
            place[height], place[width] = down, across
            mixed = images.copy()
            mixed[tuple(place)] = others[tuple(place)]
            covered = (down.stop - down.start) * (across.stop - across.start)
            share = 1 - covered / (images.shape[height] * images.shape[width])
        else:
            values = share * images + (1 - share) * others
            mixed = (values if images.dtype.kind == "f" else np.rint(values)).astype(images.dtype)
        mixed_targets = (share * targets + (1 - share) * np.roll(targets, 1, axis=0)).astype(targets.dtype)
        return {**batch, entry.name: mixed, label.name: mixed_targets}

    return augment


def cut(height: int, width: int, share: float, generator: np.random.Generator) -> tuple[slice, slice]:
    """Draw the rows and columns of the box that CutMix takes from another image, around a uniform centre.

    Its sides are ``sqrt(1 - share)`` of the image's, as far as they lie in it.
    """
    side = math.sqrt(1 - share) / 2
    middle = (int(generator.integers(height)), int(generator.integers(width)))
    spans = []
    for place, extent in zip(middle, (height, width), strict=True):
        half = int(side * extent)
        spans.append(slice(max(place - half, 0), min(place + half, extent)))
    return spans[0], spans[1]


def is_probabilities(spec: DataSpec) -> bool:
    """Whether the loss compares with a probability for each class, [batch, classes]."""
    label = spec.label
    return (
        label is not None
        and label.dtype.is_floating_point()
        and len(label.extents) == 2
        and (label.minimum, label.maximum) == (0, 1)
    )
