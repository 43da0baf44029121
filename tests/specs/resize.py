"""Interpolation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.graph import Builder, Tensor
from specs.operator_spec import OperatorSpec, Sample, normal

SHAPES = ("static", "batch", "symbolic")
SINGLE = ("float32",)


def by_scales(x: np.ndarray, factors: Sequence[float], attributes: dict[str, Any], name: str) -> Sample:
    """Scales are float32 whatever the dtype of x, so they are a constant of the graph and not an input of the sample."""
    array = np.array(factors, dtype=np.float32)

    def build(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
        return builder.op("Resize", inputs[0], None, builder.constant(array), **attributes)

    def in_torch(x: torch.Tensor) -> torch.Tensor:
        return torch_resize(x, None, torch.from_numpy(array), **attributes)

    return Sample([x], name=name, build=build, torch=in_torch)


def sizes(*extents: int) -> np.ndarray:
    return np.array(extents, dtype=np.int64)


def torch_resize(
    x: torch.Tensor,
    _roi: None,
    factors: torch.Tensor | None,
    extents: torch.Tensor | None = None,
    *,
    mode: str,
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    antialias: int = 0,
) -> torch.Tensor:
    """The cases that PyTorch has: a common target size, its own nearest rule, half pixels or aligned corners."""
    target = [int(size) for size in extents[2:]] if extents is not None else None
    if target is None:
        assert factors is not None
        target = [int(np.floor(size * factor)) for size, factor in zip(x.shape[2:], factors.tolist()[2:], strict=True)]
    if mode == "nearest":
        assert (coordinate_transformation_mode, nearest_mode) == ("asymmetric", "floor")
        return functional.interpolate(x, target, mode="nearest")
    spatial = {("linear", 3): "linear", ("linear", 4): "bilinear", ("cubic", 4): "bicubic"}[mode, x.ndim]
    aligned = coordinate_transformation_mode == "align_corners"
    return functional.interpolate(x, target, mode=spatial, align_corners=aligned, antialias=bool(antialias))


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4, 5)
    constants = (2, 3)
    torch_nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    yield by_scales(x, (1, 1, 2, 3), torch_nearest, "nearest_up")
    yield Sample([x, None, None, sizes(2, 3, 6, 3)], torch_nearest, name="nearest_sizes", constants=constants, wrt=(0,))
    yield by_scales(x, (1, 1, 2, 2), {"mode": "linear"}, "linear_up")
    yield Sample([x, None, None, sizes(2, 3, 7, 3)], {"mode": "linear"}, name="linear_sizes", constants=constants, wrt=(0,))
    corners = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    yield Sample([x, None, None, sizes(2, 3, 7, 9)], corners, name="align_corners", constants=constants, wrt=(0,))
    yield Sample(
        [normal(rng, 2, 3, 5), None, None, sizes(2, 3, 8)], {"mode": "linear"}, name="line", constants=constants, wrt=(0,)
    )
    yield Sample([x, None, None, sizes(2, 3, 4, 8)], {"mode": "linear"}, name="one_axis", constants=constants, wrt=(0,))


def samples_in_float32(rng: np.random.Generator) -> Iterator[Sample]:
    """Of the reference evaluator, cubic weights are right to seven digits in float64, and antialiasing is not PyTorch's."""
    cubic = {"mode": "cubic"}
    constants = (3,)
    yield Sample([normal(rng, 2, 3, 4, 5), None, None, sizes(2, 3, 7, 9)], cubic, name="cubic", constants=constants, wrt=(0,))
    attributes = {"mode": "linear", "antialias": 1, "exclude_outside": 1}
    yield Sample(
        [normal(rng, 2, 3, 8, 9), None, None, sizes(2, 3, 4, 5)], attributes, name="antialias", constants=constants, wrt=(0,)
    )


def further_modes(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4, 5)
    for rule in ("round_prefer_floor", "round_prefer_ceil", "ceil"):
        yield by_scales(x, (1, 1, 1.7, 0.6), {"mode": "nearest", "nearest_mode": rule}, rule)
    pytorch = {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}
    yield by_scales(x, (1, 1, 1.5, 0.4), pytorch, "pytorch_half_pixel")
    yield by_scales(x, (1.6, 2), {"mode": "linear", "axes": [2, 3]}, "axes")
    yield by_scales(x, (2, 1), {"mode": "linear", "axes": [3, 2]}, "axes_in_another_order")
    outside = {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}
    yield by_scales(x, (1, 1, 1.5, 2), outside, "cubic_exclude_outside")
    yield by_scales(x, (1, 2, 1, 2), {"mode": "nearest"}, "channels_too")


def cropped(rng: np.random.Generator) -> Iterator[Sample]:
    """Regions of interest, some of them beyond the data, where nothing comes back from; the region is a constant of the graph."""
    x = normal(rng, 2, 3, 4, 5)

    def sample(
        name: str, roi: Sequence[float], target: Sequence[int], factors: Sequence[float] = (), **attributes: Any
    ) -> Sample:
        def build(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
            data = inputs[0]
            assert data is not None
            region = builder.constant(np.array(roi, data.dtype.numpy()))
            scales = builder.constant(np.array(factors, np.float32)) if factors else None
            extents = builder.integers(target) if target else None
            mode = "tf_crop_and_resize"
            return builder.op("Resize", data, region, scales, extents, coordinate_transformation_mode=mode, **attributes)

        return Sample([x], name=name, build=build)

    whole = (0, 0, 0.2, 0.1, 1, 1, 0.9, 0.7)
    yield sample("crop", whole, (2, 3, 3, 4), mode="linear")
    yield sample("crop_beyond", (0, 0, -0.31, 0.42, 1, 1, 0.63, 1.37), (2, 3, 5, 6), mode="linear", extrapolation_value=3.0)
    yield sample("crop_scales", (0.25, 0.25, 0.75, 1.25), (), (1.5, 2.0), mode="linear", axes=[2, 3])
    yield sample("crop_nearest", (0.3, -0.2, 0.8, 1.1), (5, 6), mode="nearest", axes=[2, 3])
    yield sample("crop_one_element", (0.3, 0.1, 0.8, 0.9), (1, 3), mode="linear", axes=[2, 3])


def keeping_the_ratio(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4, 5)
    for policy in ("not_larger", "not_smaller"):
        for name, extents in (("enlarged", (7, 9)), ("reduced", (3, 3)), ("mixed", (7, 4))):
            attributes = {"mode": "linear", "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
            yield Sample([x, None, None, sizes(*extents)], attributes, name=f"{policy}_{name}", constants=(3,), wrt=(0,))
    attributes = {"mode": "nearest", "keep_aspect_ratio_policy": "not_larger", "axes": [3, 2]}
    yield Sample([x, None, None, sizes(8, 9)], attributes, name="not_larger_nearest", constants=(3,), wrt=(0,))
    attributes = {"mode": "cubic", "keep_aspect_ratio_policy": "not_smaller", "axes": [2, 3]}
    yield Sample([x, None, None, sizes(7, 7)], attributes, name="not_smaller_cubic", constants=(3,), wrt=(0,))


def further_coordinates(rng: np.random.Generator) -> Iterator[Sample]:
    x = normal(rng, 2, 3, 4, 5)
    symmetric = {"coordinate_transformation_mode": "half_pixel_symmetric"}
    yield by_scales(x, (1, 1, 1.6, 0.7), {"mode": "linear", **symmetric}, "half_pixel_symmetric")
    yield by_scales(x, (1, 1, 2.3, 0.5), {"mode": "nearest", **symmetric}, "half_pixel_symmetric_nearest")
    asymmetric = {"coordinate_transformation_mode": "asymmetric"}
    yield by_scales(x, (1, 1, 1.6, 0.7), {"mode": "linear", **asymmetric}, "asymmetric")
    yield by_scales(x, (1, 1, 1.6, 2), {"mode": "cubic", **asymmetric}, "asymmetric_cubic")
    corners = {"coordinate_transformation_mode": "align_corners"}
    yield by_scales(x, (1, 1, 2.5, 1.2), {"mode": "cubic", **corners}, "align_corners_cubic")
    yield by_scales(x, (1, 1, 2.5, 0.4), {"mode": "nearest", **corners}, "align_corners_nearest")
    volume = normal(rng, 1, 2, 3, 4, 2)
    yield by_scales(volume, (1, 1, 2, 0.5, 1.5), {"mode": "linear"}, "volume")
    yield by_scales(normal(rng, 2, 2, 8, 9), (1, 1, 0.5, 0.4), {"mode": "cubic", "antialias": 1}, "antialias_cubic")
    yield by_scales(normal(rng, 2, 2, 8, 9), (1, 1, 0.5, 0.4), {"mode": "linear", "antialias": 1}, "antialias_linear")


def without_torch(samples: Callable[[np.random.Generator], Iterator[Sample]]) -> Callable[[np.random.Generator], list[Sample]]:
    """PyTorch has none of these: central differences decide."""
    return lambda rng: [replace(sample, torch=None) for sample in samples(rng)]


SPECS = [
    OperatorSpec("Resize", samples, torch=torch_resize, shapes=SHAPES),
    OperatorSpec("Resize", without_torch(further_modes), shapes=SHAPES),
    OperatorSpec("Resize", without_torch(further_coordinates), shapes=SHAPES),
    OperatorSpec("Resize", without_torch(cropped), shapes=SHAPES),
    OperatorSpec("Resize", without_torch(keeping_the_ratio), shapes=SHAPES),
    OperatorSpec("Resize", samples_in_float32, torch=torch_resize, shapes=SHAPES, dtypes=SINGLE),
]
