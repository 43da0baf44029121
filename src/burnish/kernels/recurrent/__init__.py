"""Recurrent layers: the steps of a direction from its first frame to its last, and their gradient, as one kernel each.

Operands, outputs and attributes are those of the semantic operators; ``live`` and peepholes have no kernel.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.recurrent import GRU_STEPS, GRU_STEPS_GRAD, LSTM_STEPS, LSTM_STEPS_GRAD

FUSED_LSTM_STEPS = EngineOperator("FusedLstmSteps", LSTM_STEPS.inputs, LSTM_STEPS.outputs)
FUSED_LSTM_STEPS_GRAD = EngineOperator("FusedLstmStepsGrad", LSTM_STEPS_GRAD.inputs, LSTM_STEPS_GRAD.outputs)
FUSED_GRU_STEPS = EngineOperator("FusedGruSteps", GRU_STEPS.inputs, GRU_STEPS.outputs)
FUSED_GRU_STEPS_GRAD = EngineOperator("FusedGruStepsGrad", GRU_STEPS_GRAD.inputs, GRU_STEPS_GRAD.outputs)


_FUSED = {
    LSTM_STEPS: FUSED_LSTM_STEPS,
    LSTM_STEPS_GRAD: FUSED_LSTM_STEPS_GRAD,
    GRU_STEPS: FUSED_GRU_STEPS,
    GRU_STEPS_GRAD: FUSED_GRU_STEPS_GRAD,
}
"""The kernels' operators, by the semantic operators."""


def use_recurrent_kernels(graph: ir.Graph, threads: int) -> bool:
    """Replace the steps of LSTM and GRU layers, and their gradients, by an engine's operators, in place.

    This applies to float32 layers of the usual form: no peepholes, and every frame belongs to its sequence.

    Args:
        graph: the graph.
        threads: number of threads of the kernels.
    """
    changed = False
    for node in list(graph):
        semantic = next((operator for operator in _FUSED if operator.is_of(node)), None)
        if semantic is not None and has_recurrent_kernel(node):
            _FUSED[semantic].replace(node, threads=threads)
            changed = True
    return changed


def has_recurrent_kernel(node: ir.Node) -> bool:
    """True if the steps of a layer, or their gradient, are float32, without peepholes, and with only live frames."""
    semantic = next(operator for operator in _FUSED if operator.is_of(node))
    x = node.inputs[0]
    return x is not None and x.dtype == ir.DataType.FLOAT and not any(node.inputs[semantic.inputs.index("live") :])
