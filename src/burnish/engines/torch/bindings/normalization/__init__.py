"""Batch, group and row normalization with the activation and the addition around it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.bindings.images import as_image, from_image
from burnish.engines.torch.native import kernels
from burnish.engines.torch.native.kernels import Use, declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.normalization import (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_MERGE,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_BATCH_NORM_MERGE,
    FUSED_BATCH_NORM_MOMENTS,
    FUSED_GROUP_NORM,
    FUSED_GROUP_NORM_GRAD,
    FUSED_STANDARDIZE,
    FUSED_STANDARDIZE_GRAD,
)
from burnish.kernels.replacements import replaces
from burnish.operators.normalization.local_response import LRN_GRAD

_BATCH_NORM = (
    "batch_norm_training{}(Tensor x, Tensor scale, Tensor bias, Tensor? added, float epsilon, int activation, float limit)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_BATCH_NORM_GRADIENT = (
    "batch_norm_gradient{}(Tensor dy, Tensor x, Tensor scale, Tensor inverse_std, Tensor saved, Tensor? y, Tensor? more,"
    " Tensor? bias, int activation, float limit, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
)
_BATCH_NORM_SYNCHRONIZED = (
    "batch_norm_moments{}(Tensor x) -> (Tensor, Tensor)",
    "batch_norm_apply{}(Tensor x, Tensor pivot, Tensor center, Tensor gain, Tensor bias, Tensor? added, int activation,"
    " float limit) -> Tensor",
    "batch_norm_gradient_sums{}(Tensor dy, Tensor x, Tensor pivot, Tensor center, Tensor? y, Tensor? gain, Tensor? bias,"
    " Tensor? more, int activation, float limit, bool keep) -> (Tensor, Tensor)",
    "batch_norm_gradient_apply{}(Tensor dy, Tensor x, Tensor pivot, Tensor center, Tensor gain, Tensor slope, Tensor offset,"
    " Tensor? y, Tensor? bias, int activation, float limit) -> Tensor",
)

declare_kernel("batch_norm_gradient", *_BATCH_NORM_GRADIENT, use=Use.MOST)
declare_kernel("batch_norm", *_BATCH_NORM, use=Use.MOST)
declare_kernel(
    "standardize",
    "standardize(Tensor x, Tensor? scale, Tensor? bias, int axis, float epsilon, float offset, bool centered)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "standardize_gradient(Tensor dy, Tensor x, Tensor? mean, Tensor? shift, Tensor inverse, Tensor? scale, int axis,"
    " float offset, bool centered, bool parameters) -> (Tensor, Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel(
    "group_norm",
    "group_norm(Tensor x, Tensor scale, Tensor bias, int num_groups, float epsilon, int activation, float limit)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "group_norm_gradient(Tensor dy, Tensor x, Tensor scale, Tensor bias, Tensor mean, Tensor inverse_std, Tensor shift,"
    " int num_groups, int activation, float limit) -> (Tensor, Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel(
    "local_response",
    "local_response(Tensor x, int size, float alpha, float beta, float bias) -> Tensor",
    "local_response_gradient(Tensor dy, Tensor x, int size, float alpha, float beta, float bias) -> Tensor",
)
declare_kernel(
    "batch_norm_synchronized",
    "batch_norm_merge(Tensor gathered, Tensor scale, float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "batch_norm_gradient_merge(Tensor total, Tensor count, Tensor inverse_std, Tensor scale) -> (Tensor, Tensor, Tensor, Tensor)",
    *_BATCH_NORM_SYNCHRONIZED,
)
declare_kernel("batch_norm_bfloat16", *_BATCH_NORM, suffix="_bfloat16")
declare_kernel("batch_norm_gradient_bfloat16", *_BATCH_NORM_GRADIENT, suffix="_bfloat16")
declare_kernel("batch_norm_synchronized_bfloat16", *_BATCH_NORM_SYNCHRONIZED, suffix="_bfloat16")


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


FUSED_LRN = EngineOperator("FusedLrn", ("x",), ("y",))
FUSED_LRN_GRAD = EngineOperator("FusedLrnGrad", ("dy", "x", "y"), ("dx",))


@replaces("LRN", by=FUSED_LRN)
@replaces(LRN_GRAD, by=FUSED_LRN_GRAD)
def has_kernel(node: ir.Node) -> bool:
    """Whether a node of float32 has axes for samples and channels."""
    operand = node.inputs[0]
    return operand is not None and operand.shape is not None and len(operand.shape) >= 2


@translates(FUSED_LRN)
def local_response(op: Call) -> Any:
    return torch.ops.burnish.local_response.default(op.tensor(0), *_settings(op))


@translates(FUSED_LRN_GRAD)
def local_response_gradient(op: Call) -> Any:
    """(dy, x, y) -> dx; y is not read."""
    return torch.ops.burnish.local_response_gradient.default(op.tensor(0), op.tensor(1), *_settings(op))


def _settings(op: Call) -> tuple[int, float, float, float]:
    return op.attribute("size"), op.attribute("alpha", 1e-4), op.attribute("beta", 0.75), op.attribute("bias", 1.0)
