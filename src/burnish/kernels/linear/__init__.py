"""Products with a weight, their gradients and products of batches: the operators that a graph pass puts in their place."""

from burnish.kernels.engine_operator import EngineOperator

FUSED_LINEAR = EngineOperator("FusedLinear", ("x", "w", "b"), ("y",))
FUSED_LINEAR_GRAD = EngineOperator("FusedLinearGrad", ("dy", "x", "w"), ("dx", "dw", "db"))
FUSED_BATCHED_PRODUCT = EngineOperator("FusedBatchedProduct", ("left", "right"), ("y",))
