"""Normalization with what stands around it, by the engine's own kernels."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.kernels.normalization.operators import (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_MERGE,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_BATCH_NORM_MERGE,
    FUSED_BATCH_NORM_MOMENTS,
    FUSED_STANDARDIZE,
    FUSED_STANDARDIZE_GRAD,
)
from burnish.engines.torch.families.images import as_image, from_image
from burnish.engines.torch.native import kernels
from burnish.engines.torch.translate.rules import Call, translates

FUSED_GROUP_NORM = EngineOperator("FusedGroupNorm", ("x", "scale", "bias"), ("y", "mean", "inverse_std", "shift"))
FUSED_GROUP_NORM_GRAD = EngineOperator(
    "FusedGroupNormGrad", ("dy", "x", "scale", "bias", "mean", "inverse_std", "shift"), ("dx", "dscale", "dbias")
)


def _image(op: Call, index: int) -> Any:
    """An operand of the first one's rank as an image, None where it is left out."""
    return as_image(op.tensor(index), op.rank(0)) if op.has(index) else None


@translates(FUSED_BATCH_NORM)
def batch_norm(op: Call) -> Any:
    results = kernels.for_elements("batch_norm_training", op.dtype(0))(
        _image(op, 0),
        op.tensor(1),
        op.tensor(2),
        _image(op, 3),
        op.attribute("epsilon"),
        op.attribute("activation"),
        op.attribute("limit"),
    )
    return from_image(results[0], op.extents(0)), *(results[index] for index in range(1, 5))


@translates(FUSED_BATCH_NORM_GRAD)
def batch_norm_gradient(op: Call) -> Any:
    results = kernels.for_elements("batch_norm_gradient", op.dtype(0))(
        _image(op, 0),
        _image(op, 1),
        op.tensor(2),
        op.tensor(3),
        op.tensor(4),
        _image(op, 5),
        _image(op, 6),
        op.optional(7),
        op.attribute("activation"),
        op.attribute("limit"),
        bool(op.attribute("keep")),
    )
    kept = from_image(results[3], op.extents(0)) if op.is_read(3) else None
    return from_image(results[0], op.extents(0)), results[1], results[2], kept


@translates(FUSED_BATCH_NORM_MOMENTS)
def batch_norm_moments(op: Call) -> Any:
    results = kernels.for_elements("batch_norm_moments", op.dtype(0))(_image(op, 0))
    return results[0], results[1]


@translates(FUSED_BATCH_NORM_MERGE)
def batch_norm_merge(op: Call) -> Any:
    results = torch.ops.burnish.batch_norm_merge.default(op.tensor(0), op.tensor(1), op.attribute("epsilon"))
    return tuple(results[index] for index in range(7))


@translates(FUSED_BATCH_NORM_APPLY)
def batch_norm_apply(op: Call) -> Any:
    vectors = [op.tensor(index) for index in range(1, 5)]
    result = kernels.for_elements("batch_norm_apply", op.dtype(0))(
        _image(op, 0), *vectors, _image(op, 5), op.attribute("activation"), op.attribute("limit")
    )
    return from_image(result, op.extents(0))


@translates(FUSED_BATCH_NORM_GRAD_SUMS)
def batch_norm_gradient_sums(op: Call) -> Any:
    results = kernels.for_elements("batch_norm_gradient_sums", op.dtype(0))(
        _image(op, 0),
        _image(op, 1),
        op.tensor(2),
        op.tensor(3),
        _image(op, 4),
        op.optional(5),
        op.optional(6),
        _image(op, 7),
        op.attribute("activation"),
        op.attribute("limit"),
        bool(op.attribute("keep")),
    )
    return results[0], from_image(results[1], op.extents(0)) if op.is_read(1) else None


@translates(FUSED_BATCH_NORM_GRAD_MERGE)
def batch_norm_gradient_merge(op: Call) -> Any:
    results = torch.ops.burnish.batch_norm_gradient_merge.default(*op.tensors())
    return tuple(results[index] for index in range(4))


@translates(FUSED_BATCH_NORM_GRAD_APPLY)
def batch_norm_gradient_apply(op: Call) -> Any:
    result = kernels.for_elements("batch_norm_gradient_apply", op.dtype(0))(
        _image(op, 0),
        _image(op, 1),
        *(op.tensor(index) for index in range(2, 7)),
        _image(op, 7),
        op.optional(8),
        op.attribute("activation"),
        op.attribute("limit"),
    )
    return from_image(result, op.extents(0))


@translates(FUSED_STANDARDIZE)
def standardize(op: Call) -> Any:
    results = torch.ops.burnish.standardize.default(
        op.tensor(0),
        op.optional(1),
        op.optional(2),
        op.attribute("axis"),
        op.attribute("epsilon"),
        op.attribute("offset"),
        bool(op.attribute("centered")),
    )
    return tuple(results[index] for index in range(4))


@translates(FUSED_STANDARDIZE_GRAD)
def standardize_gradient(op: Call) -> Any:
    results = torch.ops.burnish.standardize_gradient.default(
        op.tensor(0),
        op.tensor(1),
        op.optional(2),
        op.optional(3),
        op.tensor(4),
        op.optional(5),
        op.attribute("axis"),
        op.attribute("offset"),
        bool(op.attribute("centered")),
        bool(op.attribute("parameters")),
    )
    return tuple(results[index] for index in range(3))


@translates(FUSED_GROUP_NORM)
def group_norm(op: Call) -> Any:
    """(x, scale, bias) -> y, mean, inverse deviation, shift."""
    results = torch.ops.burnish.group_norm.default(
        *op.tensors(), op.attribute("num_groups"), op.attribute("epsilon"), op.attribute("activation"), op.attribute("limit")
    )
    return tuple(results[index] for index in range(4))


@translates(FUSED_GROUP_NORM_GRAD)
def group_norm_gradient(op: Call) -> Any:
    """(dy, x, scale, bias, mean, inverse deviation, shift) -> dx, dscale, dbias."""
    results = torch.ops.burnish.group_norm_gradient.default(
        *op.tensors(), op.attribute("num_groups"), op.attribute("activation"), op.attribute("limit")
    )
    return tuple(results[index] for index in range(3))
