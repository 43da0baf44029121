"""Batch, group and row normalization with the surrounding activation and addition."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.native import Use, declare_kernel
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


IMAGES = ("dy", "x", "added", "more", "y", "dx", "before")
"""Operands and outputs of batch normalization with the layer's shape."""

calls_kernel(FUSED_BATCH_NORM, "batch_norm_training", IMAGES)
calls_kernel(FUSED_BATCH_NORM_GRAD, "batch_norm_gradient", IMAGES)
calls_kernel(FUSED_BATCH_NORM_MOMENTS, "batch_norm_moments", IMAGES)
calls_kernel(FUSED_BATCH_NORM_MERGE, "batch_norm_merge")
calls_kernel(FUSED_BATCH_NORM_APPLY, "batch_norm_apply", IMAGES)
calls_kernel(FUSED_BATCH_NORM_GRAD_SUMS, "batch_norm_gradient_sums", IMAGES)
calls_kernel(FUSED_BATCH_NORM_GRAD_MERGE, "batch_norm_gradient_merge")
calls_kernel(FUSED_BATCH_NORM_GRAD_APPLY, "batch_norm_gradient_apply", IMAGES)
calls_kernel(FUSED_STANDARDIZE, "standardize")
calls_kernel(FUSED_STANDARDIZE_GRAD, "standardize_gradient")
calls_kernel(FUSED_GROUP_NORM, "group_norm")
calls_kernel(FUSED_GROUP_NORM_GRAD, "group_norm_gradient")

FUSED_LRN = EngineOperator("FusedLrn", ("x",), ("y",))
FUSED_LRN_GRAD = EngineOperator("FusedLrnGrad", ("dy", "x", "y"), ("dx",))


@replaces("LRN", by=FUSED_LRN)
@replaces(LRN_GRAD, by=FUSED_LRN_GRAD)
def has_kernel(node: ir.Node) -> bool:
    """True if a node of float32 has axes for samples and channels."""
    operand = node.inputs[0]
    return operand is not None and operand.shape is not None and len(operand.shape) >= 2


LRN_DEFAULTS = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
calls_kernel(FUSED_LRN, "local_response", defaults=LRN_DEFAULTS)
calls_kernel(FUSED_LRN_GRAD, "local_response_gradient", defaults=LRN_DEFAULTS)
