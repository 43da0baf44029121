"""Pooling over regions of interest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from specs.operator_spec import OperatorSpec, Sample, normal

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


SPECS = [OperatorSpec("RoiAlign", roi_align_samples, shapes=SHAPES)]
