"""Local response normalization and its gradient, by kernels that keep nothing but x from the one to the other."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.families.fused import replaces
from burnish.engines.torch.translate.rules import Call, translates
from burnish.operators.normalization.local_response import LRN_GRAD

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
