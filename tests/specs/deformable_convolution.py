"""Convolution over points that are moved by offsets. PyTorch has none without torchvision: central differences decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

SHAPES = ("static", "batch", "symbolic")


def offsets(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Moves that keep away from elements, some of them beyond the data."""
    return rng.integers(-2, 3, shape) + rng.choice([0.15, 0.35, 0.65, 0.85], shape)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    def sample(name: str, *inputs: np.ndarray | None, size: tuple[int, int] = (2, 2), **attributes: Any) -> Sample:
        batched = [index for index in (0, 2, 4) if index < len(inputs)]
        return Sample(inputs, {"kernel_shape": size, **attributes}, name=name, opset=19, batched=batched)

    x, w = normal(rng, 2, 4, 4, 5), normal(rng, 6, 4, 2, 2)
    yield sample("plain", x, w, offsets(rng, 2, 8, 3, 4))
    yield sample("bias_and_mask", x, w, offsets(rng, 2, 8, 3, 4), normal(rng, 6), normal(rng, 2, 4, 3, 4))
    grouped = normal(rng, 6, 2, 2, 2), offsets(rng, 2, 16, 3, 4), None, normal(rng, 2, 8, 3, 4)
    yield sample("groups", x, *grouped, group=2, offset_group=2)
    more = normal(rng, 4, 1, 2, 2), offsets(rng, 2, 16, 3, 4), normal(rng, 4)
    yield sample("depthwise", x, *more, group=4, offset_group=2)
    window = {"pads": (1, 0, 1, 2), "strides": (2, 1), "dilations": (1, 2)}
    wide = normal(rng, 2, 4, 3, 2), offsets(rng, 2, 12, 2, 5), None, normal(rng, 2, 6, 2, 5)
    yield sample("strides_pads_and_dilations", x, *wide, size=(3, 2), **window)


WINDOW = {"kernel_shape": (2, 2)}
UNRANKED = Sample([np.zeros((1, 1, 3, 3)), np.zeros((1, 1, 2, 2)), np.zeros((1, 8, 2, 2))], WINDOW, "unranked", opset=19)
SPECS = [
    OperatorSpec(
        "DeformConv",
        samples,
        shapes=SHAPES,
        error_inputs=[ErrorInput(UNRANKED, "DeformConv .*the ranks of its inputs", shapes="unranked")],
    )
]
