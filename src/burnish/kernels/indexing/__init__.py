"""Rows that are read by index, and sums of what is added where was read: the operators that graph passes put in their place.

``extent`` of ``FusedGatherGrad`` is that of the axis that was read; the other operand of the semantic operator, whose shape the
result has, is not read.
"""

from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.row_gradients import COALESCE_ROWS

FUSED_GATHER_GRAD = EngineOperator("FusedGatherGrad", ("dy", "indices"), ("d_data",))


FUSED_COALESCE_ROWS = EngineOperator("FusedCoalesceRows", COALESCE_ROWS.inputs, COALESCE_ROWS.outputs)
FUSED_LOOKUPS = EngineOperator("FusedLookups", ("tables and indices...",), ("rows...",))
