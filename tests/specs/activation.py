"""Activation functions, Clip, Softmax and LogSoftmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.graph import Builder, Tensor
from specs.operator_spec import OperatorSpec, Sample, away_from, normal, uniform

ALL_DTYPES = ("float16", "float32", "float64")
Samples = Callable[[np.random.Generator], Iterator[Sample]]
SINGLE = 1e-7
"""For operators with float32 constants: defaults of attributes, the bodies of functions in the standard."""
ALL_SHAPES = ("static", "batch", "symbolic", "unranked")


def at(
    *kinks: float, most_nodes: int | None = None, **attributes: list[Any]
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Samples away from the kinks: one with default attributes, then one for each of the lists' entries."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample([away_from(rng, kinks, 3, 4)], name="default", most_nodes=most_nodes)
        for position in range(max((len(values) for values in attributes.values()), default=0)):
            chosen = {name: values[position] for name, values in attributes.items()}
            yield Sample(
                [away_from(rng, kinks, 3, 4)], chosen, name="_".join(f"{name}_{value}" for name, value in chosen.items())
            )

    return samples


def relu_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([away_from(rng, [0], 2, 3, 2)], name="smooth", most_nodes=1)
    yield Sample([np.array([[-1.0, 0.0, 2.0]])], name="at_zero", smooth=False)


def clip_samples(rng: np.random.Generator) -> Iterator[Sample]:
    x = away_from(rng, [-1, 0, 1.5], 3, 4)
    low, high = np.array(-1.0), np.array(1.5)
    yield Sample([x, low, high], name="constant_bounds", wrt=(0,), constants=(1, 2), most_nodes=5)
    yield Sample([x, low, high], name="computed_bounds", wrt=(0,))
    yield Sample([x, low], name="only_low", wrt=(0,), constants=(1,), most_nodes=3)
    yield Sample([x, None, high], name="only_high", wrt=(0,), constants=(2,), most_nodes=3)
    yield Sample([x], name="no_bounds", most_nodes=0)
    yield Sample([x, low, high], name="bounds_wanted")
    yield Sample([x, low], name="only_low_wanted")
    yield Sample([x, None, high], name="only_high_wanted")
    yield Sample([x, high, low], name="bounds_crossed")
    on_the_bounds = np.array([-1.0, 0.0, 1.5, 2.0, -3.0])
    yield Sample(
        [on_the_bounds, low, high],
        name="on_the_bounds_as_hardtanh",
        wrt=(0,),
        constants=(1, 2),
        smooth=False,
        torch=lambda x, low, high: functional.hardtanh(x, -1.0, 1.5),
    )


def torch_clip(x, low=None, high=None):
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


def prelu_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([away_from(rng, [0], 2, 3, 2, 2), uniform(rng, 0.1, 0.9, 3, 1, 1)], name="per_channel")
    yield Sample([away_from(rng, [0], 2, 3), uniform(rng, 0.1, 0.9, 1)], name="shared")
    yield Sample([away_from(rng, [0], 2, 3), uniform(rng, -1, 1, 2, 3)], name="per_element", batched=(0, 1))
    yield Sample([np.array([[-1.0, 0.0, 2.0]]), np.array([0.3])], name="at_zero", smooth=False)


def softmax_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([normal(rng, 3, 5)], name="default_axis", torch_attributes={"axis": -1}, most_nodes=4)
    yield Sample([normal(rng, 3, 5)], {"axis": 1}, name="last_axis")
    yield Sample([normal(rng, 3, 5)], {"axis": 0}, name="batch_axis")
    yield Sample([normal(rng, 2, 4, 3, 2)], {"axis": 1}, name="channels")
    yield Sample([normal(rng, 2, 4, 3)], {"axis": -2}, name="negative_axis")
    yield Sample([30 * normal(rng, 3, 5)], {"axis": -1}, name="confident")
    yield Sample([normal(rng, 3, 5) + 1000], {"axis": -1}, name="large_offset", smooth=False)


def one_float(function: Callable[..., Any], **renamed: str) -> Callable[..., Any]:
    """The PyTorch function with its keywords under the standard's names."""
    return lambda x, **attributes: function(x, **{renamed.get(name, name): value for name, value in attributes.items()})


def hard_sigmoid(x, alpha=0.2, beta=0.5):
    return torch.clamp(alpha * x + beta, 0, 1)


def torch_selu(x, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


def gelu_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield Sample([uniform(rng, -3, 3, 3, 4)], name="exact", opset=20, torch_attributes={}, smooth=False)
    yield Sample([uniform(rng, -3, 3, 3, 4)], {"approximate": "tanh"}, name="tanh", opset=20)
    yield Sample([np.array([-20.0, -8.0, 0.0, 8.0, 20.0])], {"approximate": "none"}, name="tails", opset=20)


def rows_without_scores(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows that a mask leaves nothing of: not a number after the Softmax, and replaced by zeros."""
    mask = np.where(np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=bool), 0.0, -np.inf)

    def by_mask(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
        masked = builder.op("Add", inputs[0], builder.constant(mask.astype(inputs[0].dtype.numpy())))
        y = builder.op("Cast", builder.op("Softmax", masked, axis=-1), to=int(masked.dtype))
        nothing = builder.constant(np.isinf(mask).all(axis=-1, keepdims=True)[None])
        return builder.op("Where", nothing, builder.scalar(0.0, y), y)

    def by_result(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
        masked = builder.op("Add", inputs[0], builder.constant(mask.astype(inputs[0].dtype.numpy())))
        y = builder.op("Softmax", masked, axis=-1)
        return builder.op("Where", builder.op("IsNaN", y), builder.scalar(0.0, y), y)

    def single_elements(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
        y = builder.op("Softmax", inputs[0], axis=-1)
        return builder.op("Where", builder.constant(np.isinf(mask)[None]), builder.scalar(0.0, y), y)

    for name, build in (("mask", by_mask), ("result", by_result), ("single_elements", single_elements)):
        yield Sample([normal(rng, 2, 3, 4)], build=build, name=f"zeros_by_{name}")


SPECS = [
    OperatorSpec("Relu", relu_samples, torch=functional.relu, shapes=ALL_SHAPES),
    OperatorSpec("Clip", clip_samples, torch=torch_clip, shapes=ALL_SHAPES),
    OperatorSpec(
        "LeakyRelu",
        at(0, most_nodes=4, alpha=[0.2, 1.5, -0.3, 0.0, 1.0]),
        torch=lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
        shapes=ALL_SHAPES,
        float64_tolerance=SINGLE,
    ),
    OperatorSpec("PRelu", prelu_samples, torch=lambda x, slope: torch.where(x > 0, x, x * slope)),
    OperatorSpec("Elu", at(0, most_nodes=3, alpha=[0.5, 2.0]), torch=lambda x, alpha=1.0: functional.elu(x, alpha)),
    OperatorSpec("Selu", at(0, alpha=[1.2], gamma=[0.9]), torch=torch_selu, float64_tolerance=SINGLE),
    OperatorSpec("Celu", at(0, alpha=[0.5, 2.0]), torch=lambda x, alpha=1.0: functional.celu(x, alpha), dtypes=("float32",)),
    OperatorSpec("Softplus", at(most_nodes=2), torch=functional.softplus),
    OperatorSpec("Softsign", at(0), torch=functional.softsign),
    OperatorSpec("Sigmoid", at(most_nodes=3), torch=torch.sigmoid, dtypes=ALL_DTYPES, shapes=ALL_SHAPES),
    OperatorSpec("HardSigmoid", at(-2.5, 2.5, -1, 1, alpha=[0.5], beta=[0.5]), torch=hard_sigmoid, float64_tolerance=SINGLE),
    OperatorSpec("HardSwish", at(-3, 3), torch=functional.hardswish, shapes=ALL_SHAPES, float64_tolerance=SINGLE),
    OperatorSpec(
        "ThresholdedRelu",
        at(1, 0.5, alpha=[0.5]),
        torch=lambda x, alpha=1.0: torch.where(x > alpha, x, torch.zeros_like(x)),
    ),
    OperatorSpec(
        "Shrink",
        at(0.5, -0.5, 1, -1, lambd=[1.0], bias=[0.3]),
        torch=lambda x, lambd=0.5, bias=0.0: torch.where(
            x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))
        ),
        dtypes=("float32",),
    ),
    OperatorSpec("Gelu", gelu_samples, torch=functional.gelu, float64_tolerance=SINGLE),
    OperatorSpec("Mish", at(), torch=functional.mish),
    OperatorSpec(
        "Swish",
        lambda rng: [
            Sample([normal(rng, 3, 4)], name="default", opset=24),
            Sample([normal(rng, 3, 4)], {"alpha": 1.7}, name="alpha", opset=24),
        ],
        torch=lambda x, alpha=1.0: x * torch.sigmoid(alpha * x),
        float64_tolerance=SINGLE,
    ),
    OperatorSpec("Softmax", softmax_samples, torch=one_float(torch.softmax, axis="dim"), shapes=ALL_SHAPES),
    OperatorSpec("Softmax", rows_without_scores),
    OperatorSpec("LogSoftmax", softmax_samples, torch=one_float(torch.log_softmax, axis="dim"), shapes=ALL_SHAPES),
]
