"""Interpolation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.graph import Builder, Tensor
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, normal

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


def samples_without_torch(rng: np.random.Generator) -> Iterator[Sample]:
    """What PyTorch does not have: central differences decide."""
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


def refused(name: str, value: str) -> ErrorInput:
    inputs = [np.zeros((1, 1, 2, 2)), np.array([0.0, 0, 0, 0, 1, 1, 1, 1]), None, sizes(1, 1, 4, 4)]
    sample = Sample(inputs, {"mode": "linear", name: value}, name=value, constants=(1, 3), wrt=(0,))
    return ErrorInput(sample, rf"Resize .*no gradient rule for {name}={value}")


SPECS = [
    OperatorSpec(
        "Resize",
        samples,
        torch=torch_resize,
        shapes=SHAPES,
        error_inputs=[
            refused("coordinate_transformation_mode", "tf_crop_and_resize"),
            refused("keep_aspect_ratio_policy", "not_larger"),
        ],
    ),
    OperatorSpec("Resize", lambda rng: [replace(sample, torch=None) for sample in samples_without_torch(rng)], shapes=SHAPES),
    OperatorSpec("Resize", samples_in_float32, torch=torch_resize, shapes=SHAPES, dtypes=SINGLE),
]
