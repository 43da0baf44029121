"""Images as patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional

from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

SHAPES = ("static", "batch", "symbolic")


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def columns_to_image_samples(rng: np.random.Generator) -> Iterator[Sample]:
    image, block = integers(5, 6), integers(2, 3)
    yield Sample([normal(rng, 2, 18, 16), image, block], name="overlapping")
    attributes = {"strides": [2, 1], "pads": [1, 2, 1, 2], "dilations": [2, 3]}
    yield Sample([normal(rng, 2, 12, 12), image, block], attributes, name="padded")


def sizes_at_run_time(rng: np.random.Generator) -> Iterator[Sample]:
    attributes = {"strides": [2, 1], "pads": [1, 2, 1, 2], "dilations": [2, 3]}
    yield Sample([normal(rng, 2, 12, 12), integers(5, 6), integers(2, 3)], attributes, name="sizes_at_run_time", constants=())


def columns_to_image_of_other_ranks(rng: np.random.Generator) -> Iterator[Sample]:
    """PyTorch has images with even padding only."""
    yield Sample([normal(rng, 2, 6, 4), integers(5), integers(2)], name="signal")
    yield Sample([normal(rng, 2, 8, 12), integers(3, 4, 2), integers(2, 2, 1)], name="volume")
    attributes = {"pads": [1, 0, 0, 2]}
    yield Sample([normal(rng, 1, 8, 15), integers(3, 4), integers(2, 2)], attributes, name="uneven_padding")


def torch_columns_to_image(
    columns: torch.Tensor,
    image: torch.Tensor,
    block: torch.Tensor,
    *,
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0, 0, 0),
    dilations: Sequence[int] = (1, 1),
) -> torch.Tensor:
    assert list(pads[:2]) == list(pads[2:])
    return functional.fold(columns, image.tolist(), block.tolist(), tuple(dilations), tuple(pads[:2]), tuple(strides))


UNKNOWN_SIZES = Sample([np.zeros((1, 4, 1)), integers(2, 2), integers(2, 2)], name="unknown_sizes", constants=())
SPECS = [
    OperatorSpec("Col2Im", columns_to_image_samples, torch=torch_columns_to_image, shapes=SHAPES),
    OperatorSpec(
        "Col2Im",
        sizes_at_run_time,
        torch=torch_columns_to_image,
        shapes=("static", "batch"),
        error_inputs=[ErrorInput(UNKNOWN_SIZES, "Col2Im .*the length of its image_shape", shapes="unranked")],
    ),
    OperatorSpec("Col2Im", columns_to_image_of_other_ranks, shapes=SHAPES),
]
