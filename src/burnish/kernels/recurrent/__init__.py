"""Recurrent layers: the steps of a direction from its first frame to its last, and back again, as one kernel each.

Operands, outputs and attributes are those of the semantic operators; ``live`` and peepholes have no kernel.
"""

from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.recurrent import GRU_STEPS, GRU_STEPS_GRAD, LSTM_STEPS, LSTM_STEPS_GRAD

FUSED_LSTM_STEPS = EngineOperator("FusedLstmSteps", LSTM_STEPS.inputs, LSTM_STEPS.outputs)
FUSED_LSTM_STEPS_GRAD = EngineOperator("FusedLstmStepsGrad", LSTM_STEPS_GRAD.inputs, LSTM_STEPS_GRAD.outputs)
FUSED_GRU_STEPS = EngineOperator("FusedGruSteps", GRU_STEPS.inputs, GRU_STEPS.outputs)
FUSED_GRU_STEPS_GRAD = EngineOperator("FusedGruStepsGrad", GRU_STEPS_GRAD.inputs, GRU_STEPS_GRAD.outputs)
