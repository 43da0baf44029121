"""The operator that a graph pass puts where the gradient of Gather was, for engines that have a kernel of it.

``extent`` is that of the axis that was read; the other operand of the semantic operator, whose shape the result has, is not read.
"""

from burnish.engines.kernels.engine_operator import EngineOperator

FUSED_GATHER_GRAD = EngineOperator("FusedGatherGrad", ("dy", "indices"), ("d_data",))
