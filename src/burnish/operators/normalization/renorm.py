"""Batch renormalization: statistics of the batch, corrected toward the running ones (Ioffe 2017).

With μ, σ the running mean and standard deviation and μ_B, σ_B those of the batch, both with epsilon under the root:
``r = clip(σ_B / σ, 1 / r_max, r_max)``, ``d = clip((μ_B - μ) / σ, -d_max, d_max)``, ``y = scale (x̂ r + d) + bias``. No gradient
passes through r and d, so the layer is batch normalization with the scale ``scale r`` and the bias ``scale d + bias``.

    BatchRenormTraining(x, scale, bias, running_mean, running_variance, r_max, d_max; epsilon) -> the outputs of BatchNormTraining

r_max and d_max are scalars of the statistics' dtype.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from burnish.graph import Tensor
from burnish.operators.normalization.batch import (
    BATCH_NORM_TRAINING,
    batch_norm_training,
    batch_norm_training_gradient,
    inverse_std_of,
)
from burnish.operators.normalization.statistics import channel_affine
from burnish.operators.registry import Operation
from burnish.operators.semantic import SemanticOperator

BATCH_RENORM_TRAINING = SemanticOperator(
    "BatchRenormTraining",
    ("x", "scale", "bias", "running_mean", "running_variance", "r_max", "d_max"),
    BATCH_NORM_TRAINING.outputs,
    BATCH_NORM_TRAINING.infer,
)


@BATCH_RENORM_TRAINING.gradient
def batch_renorm_training_gradient(op: Operation, dy: Tensor | None, *statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of batch normalization with the scale ``scale r``, and dscale = r Σ dy x̂ + d Σ dy."""
    r, d = correction(op, op.outputs[1], op.outputs[2])
    normalization = copy(op)
    normalization.inputs = (op.required(0), op.required(1) * r, op.required(2))
    dx, dgain, dbias = batch_norm_training_gradient(normalization, dy, *statistics)
    dscale = None if dgain is None or dbias is None else dgain * r + dbias * d
    return dx, dscale, dbias


@BATCH_RENORM_TRAINING.lowering
def lower_batch_renorm_training(op: Operation) -> tuple[Tensor, ...]:
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    channels = scale.dimension(0)
    if channels is None:
        zeros = scale - scale
        ones = zeros + 1
    else:
        zeros, ones = (builder.constant(np.full(channels, number, scale.dtype.numpy())) for number in (0, 1))
    normalized, mean, inverse_std, _ = batch_norm_training(builder, x, ones, zeros, op.attribute("epsilon"))
    normalization = normalized.value.producer()
    assert normalization is not None
    r, d = correction(op, mean, inverse_std)
    y = channel_affine(normalized, scale * r, bias + scale * d)
    return y, *(builder.tensor(value) for value in normalization.outputs[1:])


def correction(op: Operation, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """Emit r and d, each [C], from the statistics of the batch that BatchRenormTraining corrects."""
    running_mean, running_variance, r_max, d_max = (op.required(index) for index in range(3, 7))
    builder = op.builder
    running_inverse_std = inverse_std_of(running_variance, op.attribute("epsilon"))
    lowest = builder.op("Reciprocal", r_max)
    r = builder.op("Min", builder.op("Max", running_inverse_std / inverse_std, lowest), r_max, like=mean)
    d = builder.op("Min", builder.op("Max", (mean - running_mean) * running_inverse_std, -d_max), d_max, like=mean)
    return r, d
