"""Recurrent layers: one direction from its first frame to its last, and its gradient, in one call each."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.native import declare_kernel
from burnish.graph import attribute_value
from burnish.kernels.recurrent import FUSED_LSTM_STEPS, FUSED_LSTM_STEPS_GRAD, has_recurrent_kernel
from burnish.kernels.replacements import replaces
from burnish.kernels.thresholds import Recurrent
from burnish.operators.recurrent import LSTM_STEPS, LSTM_STEPS_GRAD

declare_kernel(
    "lstm",
    "lstm_steps(Tensor z, Tensor r, Tensor initial_h, Tensor initial_c, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "lstm_steps_gradient(Tensor r, Tensor initial_c, Tensor c, Tensor iof, Tensor g, Tensor? dh, Tensor? d_last_h,"
    " Tensor? d_last_c, bool reverse) -> (Tensor, Tensor, Tensor)",
)


@replaces(LSTM_STEPS, by=FUSED_LSTM_STEPS)
@replaces(LSTM_STEPS_GRAD, by=FUSED_LSTM_STEPS_GRAD)
def has_kernel(node: ir.Node) -> bool:
    return attribute_value(node, "hidden_size", 0) <= Recurrent.MOST_UNITS and has_recurrent_kernel(node)


calls_kernel(FUSED_LSTM_STEPS, "lstm_steps")
calls_kernel(FUSED_LSTM_STEPS_GRAD, "lstm_steps_gradient")
