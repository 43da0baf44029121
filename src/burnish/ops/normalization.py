"""Batch normalization: training and frozen, its gradient, and their lowering to standard operators.

Training mode is the semantic operator ``burnish.BatchNormTraining``: unlike the standard's operator it returns the statistics
the backward needs. ``burnish.modes`` puts it in the place of ``BatchNormalization`` and computes the running statistics.
"""

from __future__ import annotations

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor
from burnish.ops.registry import Operation, gradient, lowering


def batch_norm_training(
    builder: Builder, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize ``x`` [N, C, ...] with the statistics of the batch.

    Returns:
        y like x; mean, inverse standard deviation and population variance, each [C]:
        ``y = scale * (x - mean) * inverse_std + bias`` with ``inverse_std = 1 / sqrt(variance + epsilon)``
        (Ioffe and Szegedy 2015; ONNX BatchNormalization-15 with training_mode=1).
    """
    y, mean, inverse_std, variance = builder.op(
        "BatchNormTraining", x, scale, bias, domain=BURNISH_DOMAIN, outputs=4, like=x, epsilon=epsilon
    )
    for statistic in (mean, inverse_std, variance):
        statistic.value.type, statistic.value.shape = scale.value.type, scale.value.shape
    return y, mean, inverse_std, variance


@gradient("BatchNormTraining", domain=BURNISH_DOMAIN)
def batch_norm_training_gradient(
    op: Operation, dy: Tensor | None, d_mean: Tensor | None, d_inverse_std: Tensor | None, d_variance: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradient through the batch statistics; cotangents of the statistics themselves add their own terms."""
    x, scale = op.required(0), op.required(1)
    builder = op.builder
    _, mean, inverse_std, _ = op.outputs
    dx: Tensor | None = None
    dscale: Tensor | None = None
    dbias: Tensor | None = None
    if dy is not None:
        dx, dscale, dbias = builder.op("BatchNormGrad", dy, x, scale, mean, inverse_std, domain=BURNISH_DOMAIN, outputs=3, like=x)
        for parameter_gradient in (dscale, dbias):
            parameter_gradient.value.type, parameter_gradient.value.shape = scale.value.type, scale.value.shape
    if d_mean is None and d_inverse_std is None and d_variance is None:
        return dx, dscale, dbias
    count = elements_per_channel(x)
    centered = x - per_channel(mean, x)
    for cotangent, factor in (
        (d_mean, None),
        (d_variance, 2.0),
        (d_inverse_std, -(inverse_std * inverse_std * inverse_std)),
    ):
        if cotangent is None:
            continue
        weight = cotangent / count
        if factor is None:
            term = builder.op("Expand", per_channel(weight, x), builder.op("Shape", x), like=x)
        else:
            term = centered * per_channel(weight * factor, x)
        dx = term if dx is None else dx + term
    return dx, dscale, dbias


@gradient("BatchNormalization", since=14)
def batch_normalization(op: Operation, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Frozen statistics: mean and variance are constants, and scale, bias and x still have gradients."""
    if op.attribute("training_mode", 0):
        raise UnsupportedOperatorError(
            f"{op} is in training mode and was not bound to a mode before differentiation: "
            "differentiate through burnish.grad or burnish.compile"
        )
    x, scale, mean, variance = op.required(0), op.required(1), op.required(3), op.required(4)
    inverse_std = _inverse_std(variance, op.attribute("epsilon", 1e-5))
    axes = reduction_axes(x, op)
    builder = op.builder
    dx = dy * per_channel(scale * inverse_std, x) if op.wants(0) else None
    dbias = builder.op("ReduceSum", dy, axes, keepdims=0, like=scale) if any(map(op.wants, (2, 3))) else None
    weighted = None
    if op.wants(1) or op.wants(4):
        weighted = builder.op("ReduceSum", dy * (x - per_channel(mean, x)), axes, keepdims=0, like=scale)
    dscale = weighted * inverse_std if weighted is not None and op.wants(1) else None
    dmean = -(scale * inverse_std * dbias) if op.wants(3) and dbias is not None else None
    dvariance = None
    if weighted is not None and op.wants(4):
        dvariance = scale * inverse_std * inverse_std * inverse_std * weighted * -0.5
    return dx, dscale, dbias, dmean, dvariance


@lowering("BatchNormTraining")
def lower_batch_norm_training(op: Operation) -> tuple[Tensor, ...]:
    """The standard operator with momentum 0, whose running outputs are then exactly the batch's own statistics."""
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    epsilon = op.attribute("epsilon")
    running_mean, running_variance = _running_inputs(op, x, scale)
    y, mean, variance = builder.op(
        "BatchNormalization",
        x,
        scale,
        bias,
        running_mean,
        running_variance,
        outputs=3,
        like=x,
        epsilon=epsilon,
        momentum=0.0,
        training_mode=1,
    )
    for statistic in (mean, variance):
        statistic.value.type, statistic.value.shape = scale.value.type, scale.value.shape
    return y, mean, _inverse_std(variance, epsilon), variance


def _running_inputs(op: Operation, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros and ones [C], computed from x in every run, for running inputs that momentum 0 multiplies by 0.

    They must not be constants. ONNX Runtime writes the running outputs over the running inputs, initializers included, and
    merges equal initializers: layers with the same number of channels would overwrite each other's statistics, and a NaN
    would stay for all later runs. Layers that read the same x have the same statistics and may share these.
    """
    builder = op.builder
    axes = reduction_axes(x, op)
    count = (x.rank or 0) - 1
    one_element = builder.op("Slice", x, builder.integers([0] * count), builder.integers([1] * count), axes)
    zeros = builder.cast(builder.op("Reshape", one_element, builder.integers([-1])), scale.dtype) * 0
    zeros.value.shape = scale.value.shape
    return zeros, zeros + 1


@lowering("BatchNormGrad")
def lower_batch_norm_grad(op: Operation) -> tuple[Tensor, ...]:
    """With r the inverse std and means over the N elements of a channel (Ioffe and Szegedy 2015, section 3):

    dbias = sum(dy); dscale = r sum(dy (x - mean)); dx = scale r (dy - dbias / N - (x - mean) r dscale / N).

    x is centered before it is multiplied: sum(dy x) - mean sum(dy) loses its digits when the mean is large.
    """
    dy, x, scale, mean, inverse_std = (op.required(index) for index in range(5))
    builder = op.builder
    axes = reduction_axes(x, op)
    centered = x - per_channel(mean, x)
    dbias = builder.op("ReduceSum", dy, axes, keepdims=0, like=scale)
    dscale = builder.op("ReduceSum", dy * centered, axes, keepdims=0, like=scale) * inverse_std
    count = elements_per_channel(x)
    gain = scale * inverse_std
    slope = -(gain * inverse_std * dscale / count)
    offset = -(gain * dbias / count)
    affine = centered * per_channel(slope, x) + per_channel(offset, x)
    return dy * per_channel(gain, x) + affine, dscale, dbias


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape [C] to [C, 1, ...] so that it broadcasts along the channel axis (1) of ``like`` [N, C, ...]."""
    rank = like.rank or 0
    if rank <= 2:
        return vector
    channels = vector.dimension(0)
    return vector.builder.op(
        "Reshape",
        vector,
        vector.builder.integers([-1] + [1] * (rank - 2)),
        shape=[channels] + [1] * (rank - 2),
        dtype=vector.dtype,
    )


def elements_per_channel(x: Tensor) -> Tensor:
    """The number of elements of ``x`` [N, C, ...] in one channel, as a scalar of x's dtype, computed from its shape."""
    builder = x.builder
    axes = [0, *range(2, x.rank or 0)]
    extents = builder.op("Gather", builder.op("Shape", x), builder.integers(axes), axis=0)
    return builder.cast(builder.op("ReduceProd", extents, keepdims=0), x.dtype)


def reduction_axes(x: Tensor, op: Operation) -> Tensor:
    """The axes a batch normalization reduces over: all but the channel axis."""
    if x.rank is None:
        raise UnsupportedOperatorError(
            f"{op}: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs and load it again"
        )
    return x.builder.integers([0, *range(2, x.rank)])


def _inverse_std(variance: Tensor, epsilon: float) -> Tensor:
    return variance.builder.op("Reciprocal", variance.builder.op("Sqrt", variance + epsilon))
