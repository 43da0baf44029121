"""Chains of elementwise arithmetic, each in one pass over memory: the operators that graph passes insert.

The attributes ``program``, ``constants``, ``constant_count`` and ``dtypes`` are those of ``programs.Program``; ``summed`` and
``kept`` select the registers to sum, and the axes.
"""

from burnish.kernels.engine_operator import EngineOperator

FUSED_ELEMENTWISE = EngineOperator("FusedElementwise", ("x...",), ("y...",))
FUSED_ELEMENTWISE_SUMS = EngineOperator("FusedElementwiseSums", ("x...",), ("y...",))
FUSED_ELEMENTWISE_GROUPS = EngineOperator("FusedElementwiseGroups", ("x...",), ("y...",))
"""One program over several groups of ``operands`` tensors each; each group has its own shape."""
