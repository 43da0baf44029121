"""The steps of recurrent layers, to kernels that go through time without other nodes between frames."""

from __future__ import annotations

import onnx_ir as ir

from burnish.kernels.recurrent import FUSED_GRU_STEPS, FUSED_GRU_STEPS_GRAD, FUSED_LSTM_STEPS, FUSED_LSTM_STEPS_GRAD
from burnish.operators.recurrent import GRU_STEPS, GRU_STEPS_GRAD, LSTM_STEPS, LSTM_STEPS_GRAD

_FUSED = {
    LSTM_STEPS: FUSED_LSTM_STEPS,
    LSTM_STEPS_GRAD: FUSED_LSTM_STEPS_GRAD,
    GRU_STEPS: FUSED_GRU_STEPS,
    GRU_STEPS_GRAD: FUSED_GRU_STEPS_GRAD,
}
"""By the semantic operators that there are kernels for."""


def use_recurrent_kernels(graph: ir.Graph, threads: int) -> None:
    """Put an engine's operator in the place of the steps of LSTM and GRU layers, and of their gradients, in place.

    Of float32 layers of the usual form: no peepholes, and every frame belongs to its sequence.

    Args:
        graph: the graph.
        threads: among which the kernels divide their work.
    """
    for node in list(graph):
        semantic = next((operator for operator in _FUSED if operator.is_of(node)), None)
        if semantic is not None and has_recurrent_kernel(node):
            _FUSED[semantic].replace(node, threads=threads)


def has_recurrent_kernel(node: ir.Node) -> bool:
    """Whether the steps of a layer, or their gradient, are float32, without peepholes, and of frames that all belong to it."""
    semantic = next(operator for operator in _FUSED if operator.is_of(node))
    x = node.inputs[0]
    return x is not None and x.dtype == ir.DataType.FLOAT and not any(node.inputs[semantic.inputs.index("live") :])
