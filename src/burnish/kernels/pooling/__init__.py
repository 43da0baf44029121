"""Max pooling whose indices only its own gradient reads: the operators that a graph pass puts in its place."""

from burnish.kernels.engine_operator import EngineOperator

FUSED_MAX_POOL = EngineOperator("FusedMaxPool", ("x",), ("y", "places"))
FUSED_MAX_POOL_GRAD = EngineOperator("FusedMaxPoolGrad", ("dy", "places", "x"), ("dx",))
