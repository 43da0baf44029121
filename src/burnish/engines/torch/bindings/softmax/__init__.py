"""The gradients of softmax and its logarithm, and cross-entropy of class indices."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.native.kernels import Use, declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.softmax import FUSED_CROSS_ENTROPY, FUSED_CROSS_ENTROPY_GRAD
from burnish.operators.activation import LOG_SOFTMAX_GRAD, SOFTMAX_GRAD

declare_kernel(
    "cross_entropy",
    "cross_entropy(Tensor logits, Tensor labels, int ignored) -> (Tensor, Tensor, Tensor)",
    "cross_entropy_gradient(Tensor logits, Tensor labels, Tensor saved, Tensor flow, int ignored) -> Tensor",
    use=Use.MOST,
)


@translates(SOFTMAX_GRAD)
def softmax_gradient(op: Call) -> Any:
    return torch.ops.aten._softmax_backward_data.default(op.tensor(0), op.tensor(1), op.attribute("axis"), op.torch_dtype(1))


@translates(LOG_SOFTMAX_GRAD)
def log_softmax_gradient(op: Call) -> Any:
    return torch.ops.aten._log_softmax_backward_data.default(op.tensor(0), op.tensor(1), op.attribute("axis"), op.torch_dtype(1))


@translates(FUSED_CROSS_ENTROPY)
def cross_entropy(op: Call) -> Any:
    results = torch.ops.burnish.cross_entropy.default(op.tensor(0), op.tensor(1), op.attribute("ignored"))
    return tuple(results[index] for index in range(3))


@translates(FUSED_CROSS_ENTROPY_GRAD)
def cross_entropy_gradient(op: Call) -> Any:
    """(logits, labels, saved, cotangent of the total) -> cotangent of the logits."""
    return torch.ops.burnish.cross_entropy_gradient.default(*op.tensors(), op.attribute("ignored"))
