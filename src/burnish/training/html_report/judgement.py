"""What a report says of samples: the ones that a model gets most wrong, and how often it takes which class for which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Example:
    """A sample that the model gets wrong.

    Attributes:
        index: its place in the data set, from 0.
        truth, said: what is right, and what the model says; names of classes, or numbers.
        probability: that the model gives to the right class; None where it gives values.
        error: by which examples are ordered, the larger the worse: the cross-entropy, the squared error, or a count.
        pixels: uint8, [height, width] or [height, width, 3]; None where the sample is no image.
        values: a text, or the numbers of the sample, where it is no image.
        name: of its file; empty where it has none of its own.
    """

    index: int
    truth: str
    said: str
    probability: float | None
    error: float
    pixels: np.ndarray | None
    values: str
    name: str = ""

    @property
    def place(self) -> str:
        """Where the sample is found: its file, or its number."""
        return self.name or f"sample {self.index:,}"


@dataclass(frozen=True)
class Judgement:
    """What a model says of a data set.

    Attributes:
        samples: how many were read.
        classes: their names, in the order of their indices; empty where the model gives values.
        confusion: int64, [right class, class that the model says]; None where there are no classes, or too many.
        worst: the samples that it gets most wrong, the worst first.
        missing: why there is no matrix, or no examples; empty where there are.
        of_pixels: whether classes are those of pixels: the matrix counts these, examples are a picture, its mask and what the
            model says beside each other, ``truth`` and ``said`` the pair of classes that most wrong pixels are of, and ``error``
            the share of these.
        of_boxes: above which score boxes are judged, where these are what the model gives; else None. The matrix counts objects
            and boxes then, its last class is nothing, examples are a picture with its objects and with the boxes beside each
            other, ``truth`` and ``said`` how many of each there are, and ``error`` the objects and boxes that are wrong.
    """

    samples: int
    classes: tuple[str, ...]
    confusion: np.ndarray | None
    worst: tuple[Example, ...]
    missing: str = ""
    of_pixels: bool = False
    of_boxes: float | None = None
