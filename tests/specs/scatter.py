"""Operators that write elements by index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from specs.operator_spec import ErrorInput, OperatorSpec, Sample, distinct, normal

EVERY_SHAPE = ("static", "batch", "symbolic", "unranked")
REDUCES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def integers(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def split(rng: np.random.Generator, first: tuple[int, ...], second: tuple[int, ...]) -> list[np.ndarray]:
    """Data and updates, no two of which are equal."""
    size = int(np.prod(first))
    values = distinct(rng, size + int(np.prod(second)))
    return [values[:size].reshape(first), values[size:].reshape(second)]


def scatter_elements_samples(rng: np.random.Generator) -> Iterator[Sample]:
    data, updates = normal(rng, 3, 4), normal(rng, 2, 4)
    unique = integers([[0, 2, 1, 1], [2, 0, -1, 0]])
    yield Sample([data, unique, updates], name="overwrite")
    yield Sample([data, integers([[0, -1, 2], [1, 0, 3]]), normal(rng, 2, 3)], {"axis": 1}, name="overwrite_columns")
    repeated = integers([[0, 2, 1, 1], [0, -1, 1, 0]])
    yield Sample([data, repeated, updates], {"reduction": "add"}, name="add")
    yield Sample([data, repeated, updates], {"reduction": "add"}, name="indices_at_run_time", constants=())
    for reduction in ("mul", "max", "min"):
        data, updates = split(rng, (3, 4), (2, 4))
        yield Sample([data, repeated, updates], {"reduction": reduction}, name=reduction)
        yield Sample([data, repeated % 3, updates], {"reduction": reduction}, name=f"{reduction}_at_run_time", constants=())
        data, updates = split(rng, (3, 4), (3, 2))
        columns = integers([[0, 0], [-1, 3], [1, 2]])
        yield Sample([data, columns, updates], {"reduction": reduction, "axis": -1}, name=f"{reduction}_columns")
    yield from product_zeros(rng, np.zeros((3, 1), np.int64))


def product_zeros(rng: np.random.Generator, indices: np.ndarray) -> Iterator[Sample]:
    """Products of four factors, with a zero in the data, in the updates, two of them in several places, and three."""
    data = np.array([[0.0, 1.5, 0.0, -2.0, 0.0, 0.5]])
    updates = np.array([[1.5, 0.0, 0.0, 0.0, 0.0, 2.0], [-0.5, 2.0, 3.0, 0.0, 0.0, -1.0], [2.0, 0.5, 1.0, 1.5, 3.0, 1.0]])
    indices = indices * np.ones((1, 6), np.int64) if indices.ndim == 2 and indices.shape[1] == 1 else indices
    yield Sample([data, indices, updates], {"reduction": "mul"}, name="mul_zeros")


def torch_scatter_elements(
    data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, *, axis: int = 0, reduction: str = "none"
) -> torch.Tensor:
    places = indices % data.shape[axis]
    if reduction == "none":
        return data.scatter(axis, places, updates)
    return data.scatter_reduce(axis, places, updates, REDUCES[reduction])


def scatter_nd_samples(rng: np.random.Generator) -> Iterator[Sample]:
    data = normal(rng, 4, 3)
    yield Sample([data, integers([[3], [-4]]), normal(rng, 2, 3)], name="overwrite_rows")
    yield Sample([data, integers([[1, 2], [0, 0]]), normal(rng, 2)], name="overwrite_elements")
    yield Sample([data, integers([[1], [0], [1]]), normal(rng, 3, 3)], {"reduction": "add"}, name="add")
    yield Sample([data, integers([[1], [2]]), normal(rng, 2, 3)], name="indices_at_run_time", constants=())
    for reduction in ("mul", "max", "min"):
        data, updates = split(rng, (4, 3), (3, 3))
        yield Sample([data, integers([[1], [-4], [1]]), updates], {"reduction": reduction}, name=f"{reduction}_rows")
        data, updates = split(rng, (4, 3), (3,))
        elements = integers([[1, 2], [0, 0], [1, -1]])
        yield Sample([data, elements, updates], {"reduction": reduction}, name=f"{reduction}_elements", constants=())
    data, updates = np.array([[0.0, 1.5, -0.5], [2.0, 0.0, 3.0]]), np.array([[1.5, 0.0, 0.0], [-0.5, 2.0, 0.0]])
    yield Sample([data, integers([[0], [0]]), updates], {"reduction": "mul"}, name="mul_zeros")


def torch_scatter_nd(
    data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, *, reduction: str = "none"
) -> torch.Tensor:
    places = torch.arange(data.numel()).reshape(data.shape)[tuple(indices.unbind(-1))].reshape(-1)
    flat, values = data.reshape(-1), updates.reshape(-1)
    written = (
        flat.scatter(0, places, values) if reduction == "none" else flat.scatter_reduce(0, places, values, REDUCES[reduction])
    )
    return written.reshape(data.shape)


def ties(rng: np.random.Generator) -> Iterator[Sample]:
    """Updates that tie with the data and with each other: PyTorch shares the cotangent evenly."""
    data, updates = np.array([[1.0, 2.0, -1.0]]), np.array([[1.0, 2.0, 0.5], [1.0, 3.0, 0.5]])
    for reduction in ("max", "min"):
        inputs = [data, np.zeros((2, 3), np.int64), updates]
        yield Sample(inputs, {"reduction": reduction}, name=f"{reduction}_ties", smooth=False)


def tensor_scatter_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cache, update = normal(rng, 2, 5, 3), normal(rng, 2, 2, 3)
    newest = {"opset": 24}
    yield Sample([cache, update, integers([0, 3])], name="starts", **newest)
    yield Sample([cache, update, integers([4, 1])], {"mode": "circular"}, name="circular", **newest)
    yield Sample([cache, update], name="from_the_front", **newest)
    yield Sample([cache, update, integers([2, 1])], name="starts_at_run_time", constants=(), **newest)
    four = [normal(rng, 2, 2, 4, 3), normal(rng, 2, 2, 3, 3), integers([1, 3])]
    yield Sample(four, {"mode": "circular"}, name="heads", **newest)
    yield Sample([normal(rng, 2, 3, 5), normal(rng, 2, 3, 2), integers([1, 3])], {"axis": 2}, name="last_axis", **newest)
    yield Sample([normal(rng, 2, 4), normal(rng, 2, 1), integers([3, 0])], {"axis": -1}, name="matrix", **newest)


def torch_tensor_scatter(
    cache: torch.Tensor, update: torch.Tensor, starts: torch.Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> torch.Tensor:
    axis %= cache.dim()
    rows = torch.arange(update.shape[axis]) + (0 if starts is None else starts[:, None])
    rows = (rows % cache.shape[axis]).expand(cache.shape[0], -1)
    places = rows.reshape([cache.shape[0], *[1] * (axis - 1), -1, *[1] * (cache.dim() - 1 - axis)])
    return cache.scatter(axis, places.expand(update.shape), update)


def refused_reduction(op_type: str, indices: np.ndarray) -> ErrorInput:
    zeros = np.zeros((2, 2))
    sample = Sample([zeros, indices, zeros], {"reduction": "mean"}, name="unknown_reduction")
    return ErrorInput(sample, rf"{op_type} .*has the reduction 'mean', which the standard does not know")


SPECS = [
    OperatorSpec(
        "ScatterElements",
        scatter_elements_samples,
        torch=torch_scatter_elements,
        shapes=EVERY_SHAPE,
        error_inputs=[refused_reduction("ScatterElements", integers([[0, 1], [1, 0]]))],
    ),
    OperatorSpec("ScatterElements", ties, torch=torch_scatter_elements),
    OperatorSpec(
        "ScatterND",
        scatter_nd_samples,
        torch=torch_scatter_nd,
        shapes=EVERY_SHAPE,
        error_inputs=[refused_reduction("ScatterND", integers([[0], [1]]))],
    ),
    OperatorSpec("TensorScatter", tensor_scatter_samples, torch=torch_tensor_scatter),
]
