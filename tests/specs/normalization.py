"""Normalization layers beside batch normalization: over trailing axes, groups, channels, given axes, and by a norm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional

from burnish.errors import ModelError, UnsupportedOperatorError
from specs.operator_spec import ErrorInput, OperatorSpec, Sample, away_from, normal

RMS_OPSET = 23
GROUP_OPSET = 21
DEFAULT_EPSILON = float(np.float32(1e-5))
"""As the runtime holds it."""


def torch_layer(x, scale, bias=None, axis=-1, epsilon=DEFAULT_EPSILON, stash_type=1):
    """The definition in the standard; PyTorch's own function has no broadcast scale and no statistics."""
    axes = list(range(axis % x.dim(), x.dim()))
    mean = x.mean(axes, keepdim=True)
    inverse_std = (x.var(axes, correction=0, keepdim=True) + epsilon).rsqrt()
    y = (x - mean) * inverse_std * scale
    return y if bias is None else y + bias, mean, inverse_std


def torch_root_mean_square(x, scale, axis=-1, epsilon=DEFAULT_EPSILON):
    axes = list(range(axis % x.dim(), x.dim()))
    return x * (x.square().mean(axes, keepdim=True) + epsilon).rsqrt() * scale


def torch_group(x, scale, bias, num_groups, epsilon=DEFAULT_EPSILON):
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


def torch_instance(x, scale, bias, epsilon=DEFAULT_EPSILON):
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def torch_mean_variance(x, axes=(0, 2, 3)):
    centered = x - x.mean(axes, keepdim=True)
    return centered / (centered.square().mean(axes, keepdim=True).sqrt() + 1e-9)


def torch_lp(x, p=2, axis=-1):
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    zero = norm == 0
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, norm))


def layer_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 3, 5), normal(rng, 5), normal(rng, 5)], name="rows", most_nodes=8)
    yield Sample([normal(rng, 3, 5), normal(rng, 5)], name="no_bias", most_nodes=6)
    yield Sample([normal(rng, 2, 3, 4) + 3, normal(rng, 3, 4), normal(rng, 3, 4)], {"axis": 1}, name="two_axes")
    yield Sample([normal(rng, 2, 3, 4), normal(rng, 3, 4), normal(rng, 4)], {"axis": -2, "epsilon": 0.1}, name="epsilon")
    yield Sample([normal(rng, 2, 3, 4), normal(rng, 2, 1, 4), normal(rng, 1)], {"axis": 1}, name="broadcast")
    yield Sample([normal(rng, 2, 3), normal(rng, 2, 3), normal(rng, 2, 3)], {"axis": 0}, name="all_axes")
    yield Sample([normal(rng, 4, 40), normal(rng, 40), normal(rng, 40)], {"axis": -1}, name="blocks", wrt=[0])
    yield Sample([normal(rng, 6), normal(rng, 6), normal(rng)], name="vector", batched=())


def layer_statistics_samples(rng: np.random.Generator) -> Iterator[Sample]:
    inputs = [normal(rng, 3, 2, 4) + 2, normal(rng, 2, 4), normal(rng, 4)]
    for name, cotangents in (("statistics", [0, 1, 2]), ("statistics_alone", [1, 2])):
        yield Sample(inputs, {"axis": 1}, name=name, outputs=3, cotangents=cotangents, smooth=False, wrt=[0])
    yield Sample(inputs, {"axis": -1}, name="mean", outputs=2, cotangents=[0, 1], smooth=False)


def root_mean_square_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 3, 20), normal(rng, 20)], name="rows", opset=RMS_OPSET, most_nodes=5)
    yield Sample([normal(rng, 3, 5), normal(rng, 5)], name="short_rows", opset=RMS_OPSET, most_nodes=20)
    attributes = {"axis": 1, "epsilon": 0.5}
    yield Sample([normal(rng, 2, 3, 4), normal(rng, 3, 1)], attributes, name="two_axes", opset=RMS_OPSET)
    yield Sample([normal(rng, 2, 64), normal(rng, 64)], name="blocks", opset=RMS_OPSET, wrt=[0])


def group_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape, groups in (
        ("images", (2, 6, 2, 3), 3),
        ("sequence", (2, 4, 3), 2),
        ("flat", (3, 6), 2),
        ("one_group", (2, 3, 4), 1),
        ("blocks", (2, 4, 4, 8), 2),
    ):
        attributes = {"num_groups": groups, "epsilon": 0.01}
        inputs = [normal(rng, *shape) + 1, normal(rng, shape[1]), normal(rng, shape[1])]
        # The standard's body of the operator computes float64 in float32: too coarse for differences.
        yield Sample(inputs, attributes, name=name, opset=GROUP_OPSET, smooth=False)


def instance_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for name, shape in (("images", (2, 3, 2, 3)), ("sequence", (2, 3, 5)), ("volume", (1, 2, 2, 2, 3))):
        yield Sample([normal(rng, *shape) + 1, normal(rng, shape[1]), normal(rng, shape[1])], name=name)


def mean_variance_samples(rng: np.random.Generator) -> Iterator[Sample]:
    # The standard's body of the operator is one for float32 alone.
    yield Sample([normal(rng, 3, 2, 2, 3)], name="default", smooth=False)
    for axes in ([1], [1, 2], [-1, 0], [2, 1]):
        yield Sample([normal(rng, 3, 4, 2)], {"axes": axes}, name=f"axes_{axes}", smooth=False)
    yield Sample([1e-9 * normal(rng, 2, 8)], {"axes": [1]}, name="offset", smooth=False)


def lp_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for p in (1, 2):
        for axis in (-1, 1, 0):
            yield Sample([away_from(rng, [0], 2, 3, 4)], {"p": p, "axis": axis}, name=f"p_{p}_axis_{axis}")
        yield Sample([away_from(rng, [0], 2, 64)], {"p": p}, name=f"p_{p}_blocks")
        zeros = np.array([[3.0, -4.0], [0.0, 0.0]])
        yield Sample([zeros], {"p": p}, name=f"p_{p}_zero_row", smooth=False)


def refused(name: str, match: str, *shapes: tuple[int, ...], opset: int = 18, **attributes) -> ErrorInput:
    return ErrorInput(Sample([np.ones(shape) for shape in shapes], attributes, name=name, opset=opset), match, ModelError)


LAYER_ERRORS = (
    refused("scale", r"LayerNormalization.*Scale 'input1' of shape \[4\] does not broadcast", (2, 3), (4,)),
    refused("bias", r"LayerNormalization.*B 'input2' of shape \[2,3,1\] does not broadcast", (2, 3), (3,), (2, 3, 1)),
    refused("axis", r"LayerNormalization.*axis 2 is outside its input 'input0' of rank 2", (2, 3), (3,), axis=2),
    refused("empty", r"LayerNormalization.*normalizes over no elements.*\[2,0\]", (2, 0), (0,)),
    ErrorInput(
        Sample([np.ones((2, 3)), np.ones(3)], name="rank"), r"rank of its input 'input0'", UnsupportedOperatorError, "unranked"
    ),
)
GROUP_ERRORS = (
    refused("groups", r"num_groups = 4 does not divide the 6 channels", (2, 6, 3), (6,), (6,), opset=GROUP_OPSET, num_groups=4),
    refused(
        "scale", r"'input1' has the shape \[3\], and the 6 channels need", (2, 6, 3), (3,), (6,), opset=GROUP_OPSET, num_groups=3
    ),
    refused("empty", r"normalizes over no elements", (2, 6, 0), (6,), (6,), opset=GROUP_OPSET, num_groups=3),
    refused("channels", r"has no channel axis", (2,), (2,), (2,), opset=GROUP_OPSET, num_groups=1),
)
INSTANCE_ERRORS = (
    refused("bias", r"'input2' has the shape \[2\], and the 3 channels need", (2, 3, 4), (3,), (2,)),
    refused("spatial", r"'input0' of rank 2 has no spatial axes", (2, 3), (3,), (3,)),
    refused("empty", r"normalizes over no elements", (2, 3, 0), (3,), (3,)),
)

SPECS = [
    OperatorSpec("LayerNormalization", layer_samples, torch_layer, error_inputs=LAYER_ERRORS),
    OperatorSpec("LayerNormalization", layer_statistics_samples, torch_layer, float64_tolerance=1e-7),
    OperatorSpec(
        "RMSNormalization",
        root_mean_square_samples,
        torch_root_mean_square,
        error_inputs=(refused("scale", r"scale 'input1' of shape \[4\] does not broadcast", (2, 3), (4,), opset=RMS_OPSET),),
    ),
    OperatorSpec("GroupNormalization", group_samples, torch_group, error_inputs=GROUP_ERRORS),
    OperatorSpec("InstanceNormalization", instance_samples, torch_instance, error_inputs=INSTANCE_ERRORS),
    OperatorSpec(
        "MeanVarianceNormalization",
        mean_variance_samples,
        torch_mean_variance,
        dtypes=("float32",),
        error_inputs=(
            refused("axes", r"axis 3 is outside", (2, 3, 4)),
            refused("twice", r"none twice, not \[1, 1\]", (2, 3), axes=[1, -1]),
            refused("empty", r"normalizes over no elements", (2, 0), axes=[1]),
        ),
    ),
    OperatorSpec(
        "LpNormalization", lp_samples, torch_lp, error_inputs=(refused("p", r"p = 3, and the standard has", (2, 3), p=3),)
    ),
]
