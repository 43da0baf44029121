"""Random changes to the images of a training set, each a function of the seed, the epoch and the number of the image."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.data.image.decoding import Box
from burnish.data.image.rand_augment import LARGEST_MAGNITUDE, rand_augment
from burnish.errors import ConfigurationError
from burnish.settings import PlainSettings, is_number, is_whole, read_number, suggestion

if TYPE_CHECKING:
    from PIL import Image

TRIES = 10
"""How often a box is drawn before the centre is taken, as torchvision's RandomResizedCrop does."""
LEAST_AREA = 0.08
KINDS = {"crop": 1, "flip": 1, "rand_augment": 2, "mixup": 1, "cutmix": 1}
"""What a text may name, and how many numbers may follow."""


@dataclass(frozen=True, kw_only=True)
class ImageAugmentation(PlainSettings):
    """What training changes in images at random. None of it is done to images that are evaluated or predicted.

    Attributes:
        crop: least and largest share of an image's area that is cut out and resized to the model's size, at a random place and
            with sides in a ratio of 3:4 to 4:3 (torchvision's RandomResizedCrop, Szegedy et al. 2015); None: no random crop.
        flip: how often left and right change places, 0 to 1.
        rand_augment: how many operations of RandAugment each image undergoes (Cubuk et al. 2019).
        magnitude: of these, 0 to 30.
        mixup: alpha of MixUp (Zhang et al. 2017): a batch is mixed with itself, images and targets alike, by a share drawn from
            Beta(alpha, alpha); 0: none.
        cutmix: alpha of CutMix (Yun et al. 2019): a box of each image comes from another; 0: none. With both, each batch takes
            one of them.

    Raises:
        ConfigurationError: a number out of range.
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
        """Whether an image is changed by itself, before it comes into a batch."""
        return self.crop is not None or self.flip > 0 or self.rand_augment > 0

    @property
    def mixes(self) -> bool:
        """Whether the images of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def unmixed(self) -> ImageAugmentation | None:
        """What is changed in images by themselves; None where nothing is."""
        rest = replace(self, mixup=0.0, cutmix=0.0)
        return rest if rest.changes_images else None

    def text(self) -> str:
        """Return what is done, in words."""
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
        """Draw what is cut out of an image of this size; the numbers are drawn as torchvision's RandomResizedCrop does."""
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
        """Return an image of the size that the model takes, flipped and changed by RandAugment."""
        from PIL import ImageOps

        if self.flip and generator.random() < self.flip:
            image = ImageOps.mirror(image)
        return rand_augment(image, self.rand_augment, self.magnitude, generator)


def read_augmentation(asked: str | ImageAugmentation) -> ImageAugmentation:
    """Return what a text says: ``crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1``, each with its numbers or without.

    Raises:
        ConfigurationError: there is no such change, or it takes no such number.
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
