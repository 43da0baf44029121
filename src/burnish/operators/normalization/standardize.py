"""Standardization over trailing axes, shared by layer, group, instance and mean-variance normalization.

``burnish.Standardize`` (x - mean) / sqrt(variance + epsilon) and ``burnish.RootMeanSquareNormalize`` x / sqrt(mean(x²) + epsilon)
return the values for their backward, unlike the standard's operators. A layer adds reshapes, scale and bias. Both can be
differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, log, prod

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Tensor
from burnish.operators.normalization.statistics import blocked_sum
from burnish.operators.positions import count_like, extents, known_rank
from burnish.operators.registry import Operation
from burnish.operators.semantic import Inference, Operands, OutputType, SemanticOperator, like

LONGEST_KERNEL_ROW = 4096
"""The longest row with sums accurate to 2e-7 in ONNX Runtime's LayerNormalization kernel."""
LONGEST_PLAIN_SUM = 1024
TYPICAL_BLOCK = 32
LONGEST_BLOCK = 512
SHORTEST_BLOCK = 8
SHORT_ROW = 16
"""Up to this length the gradient of a root-mean-square normalization is computed in float64."""


def _with_statistics(number: int) -> Inference:
    """One output like x, and ``number`` statistics with extent 1 in the normalized axes."""

    def infer(operands: Operands) -> list[OutputType]:
        x, axis = operands["x"], operands.attributes["axis"]
        shape = None if x.shape is None else ir.Shape([*x.shape.dims[:axis], *[1] * -axis])
        return [OutputType.of(x), *[OutputType(x.dtype, shape)] * number]

    return infer


def standardize(x: Tensor, axis: int, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each row, the elements over all axes from ``axis`` on, to mean 0 and variance 1.

    Args:
        x: float32 or float64, of known rank.
        axis: the first normalized axis, counted from the end (negative).
        epsilon: added to the population variance.
        offset: added to the standard deviation.

    Returns:
        (x - mean) * inverse_std like x, mean, and inverse_std = 1 / (sqrt(variance + epsilon) + offset), both with extent 1 in
        the normalized axes. If that denominator is 0 (a constant row, no epsilon), inverse_std is 0.
    """
    normalized, mean, inverse_std = STANDARDIZE.emit(x, axis=axis, epsilon=epsilon, offset=offset)
    return normalized, mean, inverse_std


def root_mean_square_normalize(x: Tensor, axis: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normalize each row to a root mean square of 1: like ``standardize``, without a mean.

    Returns:
        x * inverse_rms like x, and inverse_rms = 1 / sqrt(mean(x²) + epsilon) with extent 1 in the normalized axes.
    """
    normalized, inverse_rms = ROOT_MEAN_SQUARE_NORMALIZE.emit(x, axis=axis, epsilon=epsilon)
    return normalized, inverse_rms


def staged(x: Tensor) -> Tensor:
    """Return ``x`` in the precision of its statistics: float32 for 16-bit types, otherwise its own."""
    return x if x.dtype == ir.DataType.DOUBLE else x.builder.cast(x, ir.DataType.FLOAT)


def negative_axis(op: Operation, x: Tensor, axis: int) -> int:
    """Return ``axis`` counted from the end.

    Raises:
        ModelError: ``x`` has no such axis.
    """
    rank = known_rank(op, x)
    if not -rank <= axis < rank:
        raise ModelError(f"{op}: axis {axis} is outside its input '{x.name}' of rank {rank}; correct the attribute of the node")
    return axis % rank - rank


def check_not_empty(op: Operation, x: Tensor, axis: int) -> None:
    """Raise ModelError if a row, the axes of ``x`` from ``axis`` on, is known to have no elements."""
    if any(x.dimension(position) == 0 for position in range(axis, 0)):
        raise ModelError(
            f"{op} normalizes over no elements: its input '{x.name}' has shape {x.shape}; give every normalized axis an extent"
        )


def rows_over(x: Tensor, axes: list[int]) -> tuple[Tensor, list[int] | None]:
    """Return ``x`` with ``axes`` (not negative) moved to the end, and the permutation that moves them back (None: unmoved)."""
    rank = x.rank or 0
    order = [axis for axis in range(rank) if axis not in axes] + sorted(axes)
    if order == list(range(rank)):
        return x, None
    return x.builder.op("Transpose", x, perm=order), [order.index(axis) for axis in range(rank)]


def moved_back(x: Tensor, permutation: list[int] | None) -> Tensor:
    return x if permutation is None else x.builder.op("Transpose", x, perm=permutation)


def trailing_sum(x: Tensor, axis: int, squares: bool = False) -> Tensor:
    """Sum ``x``, or its squares, over the axes from ``axis`` (negative) on, which stay with extent 1.

    A long row of known length is summed in blocks that divide it. Otherwise its axes are summed one by one; an axis of unknown
    extent next to others (the width of images) counts as short, and a single one is padded to blocks at run time.
    """
    builder = x.builder
    rank = x.rank or 0
    sizes = extents(x, axis)
    length = None if sizes is None else prod(sizes)
    blocks = None if length is None else _blocks(length)
    if blocks is not None:
        leading = rank + axis
        dimensions = [] if x.shape is None else list(x.shape.dims[:leading])
        target = builder.integers([0] * leading + blocks)
        total = builder.op("Reshape", x, target, shape=[*dimensions, *blocks], dtype=x.dtype)
        for stage in range(len(blocks), 0, -1):
            reduction = "ReduceSumSquare" if squares and stage == len(blocks) else "ReduceSum"
            total = builder.op(reduction, total, builder.integers([-1]), keepdims=int(stage == 1))
        return total if axis == -1 else builder.op("Unsqueeze", total, builder.integers(list(range(axis + 1, 0))))
    if axis < -1 and x.dimension(-1) is not None and (length is None or length > LONGEST_PLAIN_SUM):
        return _sum_by_axes(trailing_sum(x, -1, squares), range(-2, axis - 1, -1))
    terms = x * x if squares else x
    if length is not None and length <= LONGEST_PLAIN_SUM:
        return builder.op("ReduceSum", terms, builder.integers(list(range(axis, 0))), keepdims=1)
    if axis < -1:
        return _sum_by_axes(terms, range(-1, axis - 1, -1))
    return builder.op("Unsqueeze", blocked_sum(terms, rank - 1), builder.integers([-1]))


def _sum_by_axes(x: Tensor, axes: Iterable[int]) -> Tensor:
    for axis in axes:
        x = x.builder.op("ReduceSum", x, x.builder.integers([axis]), keepdims=1)
    return x


def trailing_mean(x: Tensor, axis: int, squares: bool = False) -> Tensor:
    """Average ``x``, or its squares, over the axes from ``axis`` (negative) on, which stay with extent 1."""
    return trailing_sum(x, axis, squares) / count_like(x, axis)


def standardize_gradient(op: Operation, dy: Tensor | None, d_mean: Tensor | None, d_inverse_std: Tensor | None) -> Tensor | None:
    """The gradient, with r the inverse std and y the output: r (dy - mean(dy) - k y mean(dy y)) + d_mean / N - k r² y d_r / N.

    k = (std + offset) / std, which is 1 without an offset.
    """
    y, _, inverse_std = op.outputs
    return _normalization_gradient(op, y, inverse_std, dy, d_mean, d_inverse_std, centered=True)


def root_mean_square_normalize_gradient(op: Operation, dy: Tensor | None, d_inverse_rms: Tensor | None) -> Tensor | None:
    """The gradient, with r the inverse rms and y the output: r (dy - y mean(dy y)) - r² y d_r / N."""
    x, (y, inverse_rms) = op.input, op.outputs
    sizes = extents(x, op.attribute("axis"))
    if (
        dy is not None
        and d_inverse_rms is None
        and sizes is not None
        and prod(sizes) <= SHORT_ROW
        and x.dtype == ir.DataType.FLOAT
    ):
        return _short_row_gradient(op, x, dy)
    return _normalization_gradient(op, y, inverse_rms, dy, None, d_inverse_rms, centered=False)


def _short_row_gradient(op: Operation, x: Tensor, dy: Tensor) -> Tensor:
    """r (dy - r² x mean(dy x)) in float64: in a short row dy and its part along x cancel, and y is rounded."""
    axis, epsilon = op.attribute("axis"), op.attribute("epsilon")
    x, dy = (op.builder.cast(tensor, ir.DataType.DOUBLE) for tensor in (x, dy))
    inverse = inverse_deviation(trailing_mean(x, axis, squares=True), epsilon, 0.0)
    along = inverse * inverse * trailing_mean(dy * x, axis)
    return op.builder.cast((dy - x * along) * inverse, ir.DataType.FLOAT)


def _normalization_gradient(
    op: Operation,
    y: Tensor,
    inverse: Tensor,
    dy: Tensor | None,
    d_mean: Tensor | None,
    d_inverse: Tensor | None,
    centered: bool,
) -> Tensor | None:
    axis, offset = op.attribute("axis"), op.attribute("offset", 0.0)
    dx = None if dy is None else projected(dy, y, inverse, axis, offset, centered)
    if d_inverse is not None:
        weight = d_inverse * inverse * inverse / count_like(y, axis)
        term = y * -_slope_by_std(weight, inverse, offset)
        dx = term if dx is None else dx + term
    if d_mean is not None:
        share = d_mean / count_like(y, axis)
        dx = op.builder.op("Expand", share, op.builder.op("Shape", y), like=y) if dx is None else dx + share
    return dx


def projected(dy: Tensor, y: Tensor, inverse: Tensor, axis: int, offset: float = 0.0, centered: bool = True) -> Tensor:
    """The gradient for rows from that of their standardized form ``y``: r (dy - mean(dy) - k y mean(dy y)), r the inverse std."""
    return STANDARDIZE_GRAD(dy, y, inverse, axis=axis, offset=offset, centered=int(centered))


def _slope_by_std(weight: Tensor, inverse: Tensor, offset: float) -> Tensor:
    """``weight * k`` with k = (std + offset) / std = 1 / (1 - offset * inverse); 0 if the standard deviation is 0."""
    if not offset:
        return weight
    builder = weight.builder
    share = 1 - inverse * offset
    constant = builder.op("LessOrEqual", share, builder.scalar(0, share))
    return builder.op("Where", constant, builder.scalar(0, weight), weight / builder.op("Where", constant, 1 + share, share))


def standardize_double_backward(op: Operation, v: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r (P q - k y A) with A = mean(q y) and P the centering: linear and self-adjoint in q.

    With B = mean(v y): by y, -r k (A v + B q); by r, N (mean(v P q) - k A B) - r N A B dk/dr.
    """
    q, y, r = (op.required(index) for index in range(3))
    axis, offset, centered = op.attribute("axis"), op.attribute("offset", 0.0), bool(op.attribute("centered"))
    if not op.wants(1) and not op.wants(2):
        return projected(v, y, r, axis, offset, centered), None, None
    return projection_gradients(v, q, y, r, axis, offset, centered)


def projection_gradients(
    v: Tensor, q: Tensor, y: Tensor, r: Tensor, axis: int, offset: float = 0.0, centered: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for the three operands of ``projected(q, y, r)``, given that of its result, ``v``."""
    along_q, along_v = trailing_mean(q * y, axis), trailing_mean(v * y, axis)
    dy = -(v * _slope_by_std(r * along_q, r, offset) + q * _slope_by_std(r * along_v, r, offset))
    deviation = q - trailing_mean(q, axis) if centered else q
    product = _slope_by_std(along_q * along_v, r, offset)
    by_r = trailing_mean(v * deviation, axis) - product
    if offset:
        by_r = by_r - _slope_by_std(product, r, offset) * (r * offset)
    return projected(v, y, r, axis, offset, centered), dy, by_r * count_like(y, axis)


def lower_standardize(op: Operation) -> tuple[Tensor, ...]:
    """Compute statistics and result from centered values, so that a large mean costs no digits (Chan, Golub, LeVeque 1983).

    If the rows are known to be short, x minus its mean goes through the standard's LayerNormalization, in one pass: its
    E[x²] - E[x]² is harmless there.
    """
    x = op.input
    axis, epsilon, offset = op.attribute("axis"), op.attribute("epsilon"), op.attribute("offset", 0.0)
    sizes = extents(x, axis)
    if sizes is not None and prod(sizes) <= LONGEST_KERNEL_ROW and x.dtype == ir.DataType.FLOAT and epsilon > 0 and not offset:
        return _by_standard_operator(x, axis, sizes, epsilon)
    centered, shift, variance, mean = centered_rows(x, axis)
    inverse_std = inverse_deviation(variance, epsilon, offset)
    return (centered - shift) * inverse_std, mean, inverse_std


def centered_rows(x: Tensor, axis: int, pilot: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows minus a value near their mean, the mean of that difference, the population variance, and the mean.

    Args:
        x: float32 or float64.
        axis: the first normalized axis, counted from the end (negative).
        pilot: the value to subtract; None is the rounded mean.
    """
    taken = near_mean(x, trailing_mean(x, axis), axis) if pilot is None else pilot
    centered = x - taken
    shift = trailing_mean(centered, axis)
    variance = x.builder.op("Max", trailing_mean(centered, axis, squares=True) - shift * shift, 0)
    return centered, shift, variance, taken + shift


def _by_standard_operator(x: Tensor, axis: int, sizes: tuple[int, ...], epsilon: float) -> tuple[Tensor, ...]:
    builder = x.builder
    mean = near_mean(x, builder.op("ReduceMean", x, builder.integers(list(range(axis, 0))), keepdims=1), axis)
    ones = builder.op("ConstantOfShape", builder.integers(sizes), value=ir.tensor(np.ones(1, x.dtype.numpy())), shape=sizes)
    y, shift, inverse_std = builder.op("LayerNormalization", x - mean, ones, outputs=3, like=x, axis=axis, epsilon=epsilon)
    return y, mean + shift, inverse_std


def near_mean(x: Tensor, mean: Tensor, axis: int) -> Tensor:
    """Return ``mean``, or the row's first element if the two agree to rounding: a constant row is then centered to exact zeros.

    Otherwise the rounding error of a constant row's mean would count as variance, which could be negative.
    """
    builder = x.builder
    axes = list(range(axis, 0))
    starts, ends = builder.integers([0] * len(axes)), builder.integers([1] * len(axes))
    first = builder.op("Slice", x, starts, ends, builder.integers(axes), like=mean)
    close = builder.op("LessOrEqual", builder.op("Abs", mean - first), builder.op("Abs", first) * 1e-6)
    return builder.op("Where", close, first, mean)


def lower_root_mean_square_normalize(op: Operation) -> tuple[Tensor, ...]:
    x = op.input
    inverse_rms = inverse_deviation(trailing_mean(x, op.attribute("axis"), squares=True), op.attribute("epsilon"), 0.0)
    return x * inverse_rms, inverse_rms


def lower_standardize_gradient(op: Operation) -> Tensor:
    """r (q - mean(q) - k y mean(q y)): y is centered to the last bits, so that nothing has to be corrected."""
    q, y, r = (op.required(index) for index in range(3))
    axis = op.attribute("axis")
    along = _slope_by_std(trailing_mean(q * y, axis), r, op.attribute("offset", 0.0))
    if op.attribute("centered"):
        q = q - trailing_mean(q, axis)
    return (q - y * along) * r


def inverse_deviation(square: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """1 / (sqrt(square + epsilon) + offset); 0 instead of a division by zero.

    Computed in float64: it multiplies every element of its row, and there is only one per row.
    """
    builder = square.builder
    double = builder.cast(square, ir.DataType.DOUBLE)
    root = builder.op("Sqrt", double + epsilon if epsilon else double)
    if epsilon or offset:
        inverse = builder.op("Reciprocal", root + offset if offset else root)
    else:
        zero = builder.scalar(0, root)
        inverse = builder.op("Where", builder.op("Equal", root, zero), zero, builder.op("Reciprocal", root))
    return builder.cast(inverse, square.dtype)


def _blocks(length: int) -> list[int] | None:
    """Return factors of a row's length near 32, in ascending order; at least two.

    None if one would be too small for blocks to pay, or so large that its sum loses digits. Blocks are small because rounding
    errors are not always random: squares of rounded numbers are 0, 1 or 4 modulo 8, and lose more than they gain.
    """
    factors: list[int] = []
    remaining = length
    for stage in range(max(ceil(log(length) / log(TYPICAL_BLOCK)), 2), 1, -1):
        root = remaining ** (1 / stage)
        divisors = (size for size in range(1, min(remaining, LONGEST_BLOCK) + 1) if remaining % size == 0)
        factors.append(min(divisors, key=lambda size: abs(log(size / root))))
        remaining //= factors[-1]
    factors = sorted([*factors, remaining])
    return factors if factors[-1] <= LONGEST_BLOCK and factors[-2] >= SHORTEST_BLOCK else None


STANDARDIZE = SemanticOperator(
    "Standardize",
    ("x",),
    ("normalized", "mean", "inverse_std"),
    _with_statistics(2),
    gradient=standardize_gradient,
    lowering=lower_standardize,
)
ROOT_MEAN_SQUARE_NORMALIZE = SemanticOperator(
    "RootMeanSquareNormalize",
    ("x",),
    ("normalized", "inverse_rms"),
    _with_statistics(1),
    gradient=root_mean_square_normalize_gradient,
    lowering=lower_root_mean_square_normalize,
)
STANDARDIZE_GRAD = SemanticOperator(
    "StandardizeGrad",
    ("dy", "y", "inverse"),
    ("dx",),
    like("dy"),
    gradient=standardize_double_backward,
    lowering=lower_standardize_gradient,
)

OPERATORS = [STANDARDIZE, ROOT_MEAN_SQUARE_NORMALIZE, STANDARDIZE_GRAD]
