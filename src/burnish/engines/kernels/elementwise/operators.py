"""The operators that graph passes put where chains of elementwise arithmetic were, for engines that have kernels of them.

The attributes ``program``, ``constants``, ``constant_count`` and ``dtypes`` are those of ``programs.Program``; ``summed`` and
``kept`` say which registers are added up over which axes.
"""

from burnish.engines.kernels.engine_operator import EngineOperator

FUSED_ELEMENTWISE = EngineOperator("FusedElementwise", ("x...",), ("y...",))
FUSED_ELEMENTWISE_SUMS = EngineOperator("FusedElementwiseSums", ("x...",), ("y...",))
FUSED_ELEMENTWISE_GROUPS = EngineOperator("FusedElementwiseGroups", ("x...",), ("y...",))
"""One program over several groups of ``operands`` tensors each, every group of a shape of its own."""
