"""Image augmentation: crop, flip, RandAugment, MixUp, CutMix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from burnish.data.data_spec import DataSpec
from burnish.data.loader import Augmentation
from burnish.data.preprocessing import image_layout
from burnish.errors import ConfigurationError

if TYPE_CHECKING:
    from PIL import Image
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from burnish.data.image.decoding import Box
from burnish.settings import PlainSettings, read_number, suggestion
from burnish.validation import is_number, is_whole

if TYPE_CHECKING:
    from PIL import Image


TRIES = 10
"""Attempts to draw a box before the center is used, as in torchvision's RandomResizedCrop."""
LEAST_AREA = 0.08
KINDS = {"crop": 1, "flip": 1, "rand_augment": 2, "mixup": 1, "cutmix": 1}
"""Names in an augmentation text, and the most numbers that may follow each."""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation(PlainSettings):
    """Random changes to training images; evaluation and prediction use unchanged ones.

    Attributes:
        crop: least and largest share of the area for a random crop with aspect ratio 3:4 to 4:3, resized to the model's size
            (torchvision's RandomResizedCrop, Szegedy et al. 2015), or None.
        flip: probability of a horizontal flip.
        rand_augment: RandAugment operations per image (Cubuk et al. 2019).
        magnitude: strength of RandAugment, 0 to 30.
        mixup: alpha of MixUp (Zhang et al. 2017): images and targets are mixed by a share from Beta(alpha, alpha); 0 for none.
        cutmix: alpha of CutMix (Yun et al. 2019): a box comes from another image; 0 for none. With both, each batch uses one.

    Raises:
        ConfigurationError: a number is out of range.
    """

    crop: tuple[float, float] | None = None
    flip: float = 0.0
    rand_augment: int = 0
    magnitude: int = 9
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        if self.crop is not None:
            area = tuple(self.crop)
            if len(area) != 2 or not all(map(is_number, area)) or not 0 < area[0] <= area[1] <= 1:
                raise ConfigurationError(
                    f"augment: crop={self.crop!r}: give least and largest share of the area, such as (0.08, 1)"
                )
            object.__setattr__(self, "crop", (float(area[0]), float(area[1])))
        if not is_number(self.flip) or not 0 <= self.flip <= 1:
            raise ConfigurationError(f"augment: flip={self.flip!r}: give how often, 0 to 1")
        if not is_whole(self.rand_augment) or self.rand_augment < 0:
            raise ConfigurationError(f"augment: rand_augment={self.rand_augment!r}: give a number of operations, 0 or more")
        if not is_whole(self.magnitude) or not 0 <= self.magnitude <= LARGEST_MAGNITUDE:
            raise ConfigurationError(f"augment: magnitude={self.magnitude!r}: give a whole number, 0 to {LARGEST_MAGNITUDE}")
        for name in ("mixup", "cutmix"):
            alpha = getattr(self, name)
            if not is_number(alpha) or not 0 <= alpha < math.inf:
                raise ConfigurationError(f"augment: {name}={alpha!r}: give alpha, 0 or more")

    @property
    def changes_images(self) -> bool:
        """True if single images are changed, before they are batched."""
        return self.crop is not None or self.flip > 0 or self.rand_augment > 0

    @property
    def mixes(self) -> bool:
        """True if the images of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def unmixed(self) -> ImageAugmentation | None:
        """The augmentation of single images, without mixing; None if there is none."""
        rest = replace(self, mixup=0.0, cutmix=0.0)
        return rest if rest.changes_images else None

    def text(self) -> str:
        """Return the augmentation in words."""
        parts = []
        if self.crop is not None:
            parts.append(f"random crops of {100 * self.crop[0]:g} to {100 * self.crop[1]:g} % of the area")
        if self.flip:
            parts.append(f"{100 * self.flip:g} % flipped")
        if self.rand_augment:
            parts.append(f"RandAugment of {self.rand_augment} operations at magnitude {self.magnitude}")
        parts += [f"{name} with alpha {alpha:g}" for name, alpha in (("MixUp", self.mixup), ("CutMix", self.cutmix)) if alpha]
        return ", ".join(parts) or "none"

    def box(self, width: int, height: int, generator: np.random.Generator) -> Box:
        """Draw a crop box for an image of this size, by the algorithm of torchvision's RandomResizedCrop."""
        assert self.crop is not None
        for _ in range(TRIES):
            area = width * height * generator.uniform(*self.crop)
            ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = int(generator.integers(0, width - across + 1)), int(generator.integers(0, height - down + 1))
                return left, top, left + across, top + down
        across, down = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - across) // 2, (height - down) // 2
        return left, top, left + across, top + down

    def changed(self, image: Image.Image, generator: np.random.Generator) -> Image.Image:
        """Return an image of the model's size, randomly flipped and changed by RandAugment."""
        from PIL import ImageOps

        if self.flip and generator.random() < self.flip:
            image = ImageOps.mirror(image)
        return rand_augment(image, self.rand_augment, self.magnitude, generator)


def read_augmentation(asked: str | ImageAugmentation) -> ImageAugmentation:
    """Parse an augmentation text such as ``crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1``; the numbers are optional.

    Raises:
        ConfigurationError: an unknown name or an invalid number.
    """
    if isinstance(asked, ImageAugmentation):
        return asked
    read = ImageAugmentation()
    for part in filter(None, (part.strip() for part in asked.split(","))):
        name, *numbers = part.split(":")
        if name not in KINDS:
            raise ConfigurationError(f"augment: there is no '{name}'{suggestion(name, KINDS)}; give {', '.join(KINDS)}")
        read = replace(read, **_settings(name, part, numbers))
    return read


def _settings(name: str, part: str, texts: list[str]) -> dict[str, Any]:
    try:
        numbers = [read_number(text) for text in texts]
    except ValueError:
        numbers = []
    if len(numbers) != len(texts) or len(numbers) > KINDS[name]:
        count = "a number" if KINDS[name] == 1 else f"up to {KINDS[name]} numbers"
        raise ConfigurationError(f"augment: '{part}': {name} takes {count} after a colon, such as {name}:{_EXAMPLES[name]}")
    if name == "crop":
        return {"crop": (numbers[0] if numbers else LEAST_AREA, 1.0)}
    if name == "rand_augment":
        whole = [int(number) if number.is_integer() else number for number in numbers]
        return dict(zip(("rand_augment", "magnitude"), whole or [2], strict=False))
    return {name: numbers[0] if numbers else {"flip": 0.5, "mixup": 0.2, "cutmix": 1.0}[name]}


_EXAMPLES = {"crop": "0.3", "flip": "0.5", "rand_augment": "2:9", "mixup": "0.2", "cutmix": "1"}


LARGEST_MAGNITUDE = 30


def rand_augment(image: Image.Image, operations: int, magnitude: int, generator: np.random.Generator) -> Image.Image:
    """Return an image after RandAugment.

    Args:
        image: 8-bit, gray or RGB.
        operations: number of random operations.
        magnitude: 0 to 30; operations with a direction go either way.
        generator: source of the operations and directions.
    """
    for _ in range(operations):
        operation = OPERATIONS[int(generator.integers(len(OPERATIONS)))]
        image = operation(image, magnitude / LARGEST_MAGNITUDE, 1.0 if generator.random() < 0.5 else -1.0)
    return image


def _sheared(image: Image.Image, across: float, down: float) -> Image.Image:
    from PIL import Image

    # About the upper left corner, as in torchvision.
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

    # 256 is above every pixel, so nothing is inverted.
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


def mixing(augmentation: ImageAugmentation, spec: DataSpec) -> Augmentation:
    """Return MixUp or CutMix for a ``Loader``; each image is mixed with the one before it in the batch.

    Random numbers come from the loader's seed, epoch and batch on the host, so they are equal for all engines.

    Args:
        augmentation: alpha for one or both.
        spec: inputs of the program: images, and target probabilities [batch, classes].

    Raises:
        ConfigurationError: the loss takes class indices, which cannot be mixed.
        DataError: the model's input does not take images.
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
    """Draw the rows and columns of CutMix's box around a uniform center.

    Its sides are ``sqrt(1 - share)`` of the image's, clipped to the image.
    """
    side = math.sqrt(1 - share) / 2
    middle = (int(generator.integers(height)), int(generator.integers(width)))
    spans = []
    for place, extent in zip(middle, (height, width), strict=True):
        half = int(side * extent)
        spans.append(slice(max(place - half, 0), min(place + half, extent)))
    return spans[0], spans[1]


def is_probabilities(spec: DataSpec) -> bool:
    """True if the loss takes a probability for each class, [batch, classes]."""
    label = spec.label
    return (
        label is not None
        and label.dtype.is_floating_point()
        and len(label.extents) == 2
        and (label.minimum, label.maximum) == (0, 1)
    )
