"""The steps of an LSTM and their gradient, by kernels that go through time without Python between frames."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.kernels.recurrent.fusion import has_recurrent_kernel
from burnish.engines.kernels.recurrent.operators import FUSED_LSTM_STEPS, FUSED_LSTM_STEPS_GRAD
from burnish.engines.torch.families.fused import replaces
from burnish.engines.torch.families.recurrent import schemas  # noqa: F401  # declares the kernels
from burnish.engines.torch.families.thresholds import Recurrent
from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import attribute_value
from burnish.operators.recurrent import LSTM_STEPS, LSTM_STEPS_GRAD


@replaces(LSTM_STEPS, by=FUSED_LSTM_STEPS)
@replaces(LSTM_STEPS_GRAD, by=FUSED_LSTM_STEPS_GRAD)
def has_kernel(node: ir.Node) -> bool:
    return attribute_value(node, "hidden_size", 0) <= Recurrent.MOST_UNITS and has_recurrent_kernel(node)


@translates(FUSED_LSTM_STEPS)
def lstm_steps(op: Call) -> Any:
    operands = [op.tensor(index) for index in range(4)]
    results = torch.ops.burnish.lstm_steps.default(*operands, bool(op.attribute("reverse")))
    return tuple(results[index] for index in range(6))


@translates(FUSED_LSTM_STEPS_GRAD)
def lstm_steps_gradient(op: Call) -> Any:
    operands = [op.tensor(index) for index in range(5)]
    cotangents = [op.optional(index) for index in range(5, 8)]
    results = torch.ops.burnish.lstm_steps_gradient.default(*operands, *cotangents, bool(op.attribute("reverse")))
    return tuple(results[index] for index in range(3))
