"""Ghost batch normalization: statistics over groups of samples (Hoffer, Hubara and Soudry 2017)."""

from __future__ import annotations

from functools import partial

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.operators.normalization.batch import batch_norm_training
from burnish.operators.normalization.statistics import elements_per_channel
from burnish.operators.positions import extent, joined, reshape_as, reshape_to


def ghost_batch_norm_training(
    builder: Builder, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize ``x`` [N, C, ...] by the statistics of groups of ``size`` consecutive samples; ``size`` divides N.

    The groups are laid out as channels, [size, N / size * C, ...], so that the layer itself is batch normalization.

    Returns:
        y like x; the mean over the groups of their means and of their population variances, each [C]; and the number of
        elements per channel of one group, a scalar.
    """
    if x.rank is None:
        raise UnsupportedOperatorError(
            f"ghost batch normalization: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs"
        )
    sizes = [x.dimension(axis) or partial(extent, x, axis) for axis in range(1, x.rank)]
    batch, channels = x.dimension(0), x.dimension(1)
    groups = None if batch is None else batch // size
    count = builder.integers([groups]) if groups is not None else extent(x, 0) / size
    by_group = reshape_to(x, [groups or (lambda: count), size, *sizes])
    exchange = [1, 0, *range(2, x.rank + 1)]
    exchanged = builder.op("Transpose", by_group, perm=exchange)
    merged = None if groups is None or channels is None else groups * channels
    side_by_side = reshape_to(exchanged, [size, merged or (lambda: count * extent(x, 1)), *sizes[1:]])
    rows = joined(builder, [count, extent(x, 1)])
    y, means, _, variances = batch_norm_training(builder, side_by_side, _tiled(scale, rows), _tiled(bias, rows), epsilon)
    back = builder.op("Transpose", reshape_as(y, exchanged), perm=exchange, like=by_group)
    mean, variance = (_mean_over_groups(statistic, rows, scale) for statistic in (means, variances))
    return reshape_as(back, x), mean, variance, elements_per_channel(side_by_side)


def _tiled(vector: Tensor, rows: Tensor) -> Tensor:
    """Repeat [C] for every group: [groups * C]; ``rows`` is [groups, C]."""
    builder = vector.builder
    return builder.op("Reshape", builder.op("Expand", vector, rows), builder.integers([-1]))


def _mean_over_groups(statistics: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Average [groups * C] over the groups: [C]; ``rows`` is [groups, C]."""
    builder = statistics.builder
    return builder.op("ReduceMean", builder.op("Reshape", statistics, rows), builder.integers([0]), keepdims=0, like=like)
