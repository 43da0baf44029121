"""Pooling over regions of interest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from burnish.errors import UnsupportedOperatorError
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, distinct, normal

SHAPES = ("static", "batch", "symbolic")
REGIONS = [[1.31, 0.72, 6.13, 5.24], [0.17, 0.26, 3.35, 3.11], [-2.57, -3.13, 9.21, 9.53], [2.05, 2.11, 2.33, 2.24]]
MALFORMED = [5.12, 4.21, 3.33, 2.14]


def roi_align_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Regions inside, beyond the image, smaller than an element, and malformed."""
    rois, batch = np.array([*REGIONS, MALFORMED]), np.array([0, 1, 1, 0, 1])
    for mode, ratio, coordinates in product(("avg", "max"), (0, 2), ("half_pixel", "output_half_pixel")):
        attributes = {"mode": mode, "sampling_ratio": ratio, "coordinate_transformation_mode": coordinates}
        attributes |= {"output_height": 2, "output_width": 3, "spatial_scale": 0.75}
        label = f"{mode}_{ratio}_{coordinates}"
        yield Sample([normal(rng, 2, 3, 7, 6), rois, batch], attributes, name=label, constants=(), batched=(0,))
    x = normal(rng, 2, 2, 4, 5)
    yield Sample([x, rois[:3], batch[:3].astype(np.int64)], name="defaults", constants=(2,), batched=(0,))
    yield Sample([x, np.zeros((0, 4)), np.zeros(0, np.int64)], {"sampling_ratio": 2}, name="no_regions", batched=(0,))
    yield Sample([x, np.zeros((0, 4)), np.zeros(0, np.int64)], name="no_regions_adaptive", batched=(0,))


def max_roi_pool_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Regions inside, beyond the image, smaller than a bin, malformed, and outside of the image."""
    corners = np.array([*REGIONS, MALFORMED, [30.0, 40.0, 32.0, 45.0], [2.5, 1.5, 5.5, 4.5]])
    rois = np.concatenate([np.array([[0, 1, 1, 0, 1, 0, 1]]).T, corners], axis=1)
    x = distinct(rng, 2, 3, 7, 6)
    yield Sample([x, rois], {"pooled_shape": [2, 3]}, name="regions", newest_opset=False, wrt=(0,))
    attributes = {"pooled_shape": [3, 2], "spatial_scale": 0.5}
    yield Sample([x, rois], attributes, name="spatial_scale", newest_opset=False, wrt=(0,))


def torch_max_roi_pool(
    x: torch.Tensor, rois: torch.Tensor, *, pooled_shape: Sequence[int], spatial_scale: float = 1.0
) -> torch.Tensor:
    """Girshick 2015, "Fast R-CNN", as Caffe pools."""
    regions = []
    for image, *numbers in rois.tolist():
        left, top, right, bottom = (math.copysign(math.floor(abs(n * spatial_scale) + 0.5), n) for n in numbers)
        rows = bins(top, bottom, pooled_shape[0], x.shape[2])
        columns = bins(left, right, pooled_shape[1], x.shape[3])
        boxes = [x[int(image), :, a:b, c:d] for a, b in rows for c, d in columns]
        pooled = [box.amax((1, 2)) if box.numel() else x.new_zeros(x.shape[1]) for box in boxes]
        regions.append(torch.stack(pooled, -1).reshape(-1, *pooled_shape))
    return torch.stack(regions)


def bins(start: float, end: float, number: int, size: int) -> list[tuple[int, int]]:
    """Where each bin of a region begins and ends along an axis, inside of the image."""
    length = max(end - start + 1, 1) / number
    limits = [(math.floor(place * length) + start, math.ceil((place + 1) * length) + start) for place in range(number)]
    return [(int(min(max(a, 0), size)), int(min(max(b, 0), size))) for a, b in limits]


UNRANKED = Sample([np.zeros((1, 1, 4, 4)), np.zeros((1, 4)), np.zeros(1, np.int64)], name="unranked")
SPECS = [
    OperatorSpec(
        "RoiAlign",
        roi_align_samples,
        shapes=SHAPES,
        error_inputs=[ErrorInput(UNRANKED, "RoiAlign .*the rank of its input", UnsupportedOperatorError, "unranked")],
    ),
    OperatorSpec("MaxRoiPool", max_roi_pool_samples, torch=torch_max_roi_pool, shapes=(*SHAPES, "unranked"), dtypes=("float32",)),
]
