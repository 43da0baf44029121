"""RandAugment (Cubuk, Zoph, Shlens and Le, 2019): a few operations on each image, drawn from fourteen, at one magnitude.

The operations and their strengths are those of torchvision's ``RandAugment``, whose magnitudes go from 0 to 30.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

LARGEST_MAGNITUDE = 30


def rand_augment(image: Image.Image, operations: int, magnitude: int, generator: np.random.Generator) -> Image.Image:
    """Return an image after so many operations, each drawn anew.

    Args:
        image: 8-bit, gray or RGB.
        operations: how many.
        magnitude: 0 to 30; those of a direction go either way.
        generator: draws operations and directions.
    """
    for _ in range(operations):
        operation = OPERATIONS[int(generator.integers(len(OPERATIONS)))]
        image = operation(image, magnitude / LARGEST_MAGNITUDE, 1.0 if generator.random() < 0.5 else -1.0)
    return image


def _sheared(image: Image.Image, across: float, down: float) -> Image.Image:
    from PIL import Image

    # About the left upper corner, as torchvision's operation is.
    return image.transform(image.size, Image.Transform.AFFINE, (1, across, 0, down, 1, 0), Image.Resampling.NEAREST)


def _moved(image: Image.Image, across: float, down: float) -> Image.Image:
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, (1, 0, -across, 0, 1, -down), Image.Resampling.NEAREST)


def _enhanced(kind: str) -> Callable[[Image.Image, float, float], Image.Image]:
    def operation(image: Image.Image, strength: float, sign: float) -> Image.Image:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(1 + sign * 0.9 * strength)

    return operation


def _posterized(image: Image.Image, strength: float, sign: float) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.posterize(image, 8 - round(4 * strength))


def _solarized(image: Image.Image, strength: float, sign: float) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.solarize(image, 255 - round(255 * strength) if strength else 256)


def _with_full_contrast(image: Image.Image, strength: float, sign: float) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _equalized(image: Image.Image, strength: float, sign: float) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.equalize(image)


LARGEST_SHEAR, LARGEST_MOVE, LARGEST_ANGLE = 0.3, 150 / 331, 30.0
OPERATIONS: tuple[Callable[[Image.Image, float, float], Image.Image], ...] = (
    lambda image, strength, sign: image,
    lambda image, strength, sign: _sheared(image, sign * LARGEST_SHEAR * strength, 0.0),
    lambda image, strength, sign: _sheared(image, 0.0, sign * LARGEST_SHEAR * strength),
    lambda image, strength, sign: _moved(image, int(sign * LARGEST_MOVE * image.width * strength), 0.0),
    lambda image, strength, sign: _moved(image, 0.0, int(sign * LARGEST_MOVE * image.height * strength)),
    lambda image, strength, sign: image.rotate(sign * LARGEST_ANGLE * strength),
    _enhanced("Brightness"),
    _enhanced("Color"),
    _enhanced("Contrast"),
    _enhanced("Sharpness"),
    _posterized,
    _solarized,
    _with_full_contrast,
    _equalized,
)
