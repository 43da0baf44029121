"""The gradients of softmax and its logarithm, and cross-entropy of class indices."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.native import Use, declare_kernel
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


calls_kernel(FUSED_CROSS_ENTROPY, "cross_entropy")
calls_kernel(FUSED_CROSS_ENTROPY_GRAD, "cross_entropy_gradient")
