"""Reductions along axes, and cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from specs.operator_spec import OperatorSpec, Sample, away_from, distinct, normal, uniform

AXES = {
    "all": None,
    "last": [-1],
    "channels": [1],
    "batch": [0],
    "two": [0, 2],
    "unordered": [2, -2],
    "empty": [],
}


def reduction(
    op_type: str,
    function: Callable[..., torch.Tensor],
    values: Callable[..., np.ndarray] = normal,
    elementwise: Callable[..., torch.Tensor] = lambda x: x.clone(),
    extra: Callable[[np.random.Generator], list[Sample]] = lambda rng: [],
    **options,
) -> OperatorSpec:
    """A record over all forms of axes.

    Args:
        function: the reduction in PyTorch, ``function(x, axes, keepdims)`` with the axes as a list.
        elementwise: what remains of it when no axis is reduced (``noop_with_empty_axes`` without axes).
    """

    def torch_function(x, axes=None, keepdims=1, noop_with_empty_axes=0):
        positions = [] if axes is None else axes.tolist()
        if not positions and noop_with_empty_axes:
            return elementwise(x)
        return function(x, positions or list(range(x.dim())), bool(keepdims))

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for keepdims, names in ((0, AXES), (1, ("all", "two"))):
            for name in names:
                axes = AXES[name]
                inputs = [values(rng, 2, 3, 4)] + ([] if axes is None else [np.array(axes, dtype=np.int64)])
                yield Sample(inputs, {"keepdims": keepdims}, name=f"{name}_keepdims_{keepdims}")
        yield Sample([values(rng, 2, 3)], name="default")
        yield Sample([values(rng, 2, 3)], {"noop_with_empty_axes": 1}, name="noop")
        yield Sample([values(rng, 2, 3), np.array([1])], {"noop_with_empty_axes": 1}, name="noop_with_axes")
        yield Sample([values(rng, 2, 3, 4), np.array([0, 2])], {"keepdims": 0}, name="axes_at_run_time", constants=())
        yield from extra(rng)

    return OperatorSpec(op_type, samples, torch=torch_function, **options)


def prod(x: torch.Tensor, axes: list[int], keepdims: bool) -> torch.Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keepdims)
    return x


def ties(rng: np.random.Generator) -> list[Sample]:
    x = np.array([[1.0, 1.0, 0.0], [2.0, -1.0, 2.0]])
    return [Sample([x, np.array([axis])], name=f"ties_axis_{axis}", smooth=False) for axis in (0, 1)]


def zeros(rng: np.random.Generator) -> list[Sample]:
    x = np.array([[1.5, 2.0, -0.5], [2.0, 0.0, 3.0], [0.0, 0.0, 3.0]])
    return [Sample([x, np.array([1])], name="zeros"), Sample([x], name="zeros_all")]


def zero_row(rng: np.random.Generator) -> list[Sample]:
    return [Sample([np.array([[3.0, -4.0], [0.0, 0.0]]), np.array([1])], name="zero_row", smooth=False)]


def spread(rng: np.random.Generator) -> list[Sample]:
    return [Sample([100 * normal(rng, 3, 4), np.array([1])], name="spread")]


def all_masked(rng: np.random.Generator) -> list[Sample]:
    x = np.array([[0.5, -np.inf, 1.0], [-np.inf, -np.inf, -np.inf]])
    return [Sample([x[:1], np.array([1])], name="partly_masked", smooth=False)]


def cumsum_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for exclusive in (0, 1):
        for reverse in (0, 1):
            attributes = {"exclusive": exclusive, "reverse": reverse}
            yield Sample([normal(rng, 3, 4), np.array(1)], attributes, name=f"{exclusive}{reverse}", most_nodes=1)
    yield Sample([normal(rng, 3, 4), np.array(-2)], name="negative_axis")


def cumprod_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for exclusive in (0, 1):
        for reverse in (0, 1):
            attributes = {"exclusive": exclusive, "reverse": reverse}
            inputs = [away_from(rng, [0], 3, 4, margin=0.3), np.array(1)]
            yield Sample(inputs, attributes, name=f"{exclusive}{reverse}", opset=26)
            yield Sample([PRODUCTS_WITH_ZEROS, np.array(1)], attributes, name=f"zeros_{exclusive}{reverse}", opset=26)
    yield Sample([away_from(rng, [0], 3, 2, 2, margin=0.3), np.array(-3)], name="negative_axis", opset=26)


PRODUCTS_WITH_ZEROS = np.array(
    [[1.5, 2.0, -0.5, 3.0], [2.0, 0.0, 3.0, 0.5], [0.0, 2.0, 0.0, -1.5], [0.0, 0.0, 0.0, 2.0], [2.0, 1.5, -1.0, 0.0]]
)


def torch_cumprod(x: torch.Tensor, axis: torch.Tensor, *, exclusive: int = 0, reverse: int = 0) -> torch.Tensor:
    dim = int(axis)
    x = x.flip(dim) if reverse else x
    if exclusive:
        x = torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    product = torch.cumprod(x, dim)
    return product.flip(dim) if reverse else product


SPECS = [
    reduction("ReduceSum", torch.sum, dtypes=("float16", "float32", "float64")),
    reduction("ReduceMean", torch.mean, dtypes=("float16", "float32", "float64")),
    reduction("ReduceMax", torch.amax, values=distinct, extra=ties),
    reduction("ReduceMin", torch.amin, values=distinct, extra=ties),
    reduction("ReduceProd", prod, values=lambda rng, *shape: away_from(rng, [0], *shape, margin=0.3), extra=zeros),
    reduction(
        "ReduceL1",
        lambda x, axes, keepdims: torch.linalg.vector_norm(x, 1, axes, keepdims),
        values=lambda rng, *shape: away_from(rng, [0], *shape),
        elementwise=torch.abs,
    ),
    reduction(
        "ReduceL2",
        lambda x, axes, keepdims: torch.linalg.vector_norm(x, 2, axes, keepdims),
        values=lambda rng, *shape: away_from(rng, [0], *shape),
        elementwise=torch.abs,
        extra=zero_row,
    ),
    reduction(
        "ReduceLogSum",
        lambda x, axes, keepdims: torch.log(torch.sum(x, axes, keepdims)),
        values=lambda rng, *shape: uniform(rng, 0.5, 2, *shape),
        elementwise=torch.log,
    ),
    reduction("ReduceLogSumExp", torch.logsumexp, extra=lambda rng: spread(rng) + all_masked(rng)),
    reduction("ReduceSumSquare", lambda x, axes, keepdims: torch.sum(x * x, axes, keepdims), elementwise=lambda x: x * x),
    OperatorSpec("CumSum", cumsum_samples),
    OperatorSpec("CumProd", cumprod_samples, torch=torch_cumprod),
]
