"""Normalization in training with the surrounding operators: the operators that graph passes insert.

``activation`` and ``limit`` are those of ``surroundings``; ``saved`` [2, C] holds the statistics for the gradient: the pilot and
the shift of ``batch_norm_forward.h``.
"""

from burnish.kernels.engine_operator import EngineOperator

FUSED_BATCH_NORM = EngineOperator(
    "FusedBatchNorm", ("x", "scale", "bias", "added"), ("y", "mean", "inverse_std", "variance", "saved")
)
FUSED_BATCH_NORM_GRAD = EngineOperator(
    "FusedBatchNormGrad", ("dy", "x", "scale", "inverse_std", "saved", "y", "more", "bias"), ("dx", "dscale", "dbias", "before")
)

FUSED_BATCH_NORM_MOMENTS = EngineOperator("FusedBatchNormMoments", ("x",), ("moments", "pivot"))
FUSED_BATCH_NORM_MERGE = EngineOperator(
    "FusedBatchNormMerge", ("gathered", "scale"), ("count", "center", "precise", "mean", "inverse_std", "variance", "gain")
)
FUSED_BATCH_NORM_APPLY = EngineOperator("FusedBatchNormApply", ("x", "pivot", "center", "gain", "bias", "added"), ("y",))
FUSED_BATCH_NORM_GRAD_SUMS = EngineOperator(
    "FusedBatchNormGradSums", ("dy", "x", "pivot", "center", "y", "gain", "bias", "more"), ("sums", "before")
)
FUSED_BATCH_NORM_GRAD_MERGE = EngineOperator(
    "FusedBatchNormGradMerge", ("total", "count", "inverse_std", "scale"), ("slope", "offset", "dscale", "dbias")
)
FUSED_BATCH_NORM_GRAD_APPLY = EngineOperator(
    "FusedBatchNormGradApply", ("dy", "x", "pivot", "center", "gain", "slope", "offset", "y", "bias"), ("dx",)
)
"""The parts of a layer with statistics of several workers (``burnish.operators.normalization.synchronized``)."""

FUSED_STANDARDIZE = EngineOperator("FusedStandardize", ("x", "scale", "bias"), ("y", "mean", "shift", "inverse"))
FUSED_STANDARDIZE_GRAD = EngineOperator(
    "FusedStandardizeGrad", ("dy", "x", "mean", "shift", "inverse", "scale"), ("dx", "dscale", "dbias")
)
"""Normalization over the axes from ``axis`` on, with the scale and the bias of a layer, and its gradient (``standardize.h``)."""


FUSED_GROUP_NORM = EngineOperator("FusedGroupNorm", ("x", "scale", "bias"), ("y", "mean", "inverse_std", "shift"))
FUSED_GROUP_NORM_GRAD = EngineOperator(
    "FusedGroupNormGrad", ("dy", "x", "scale", "bias", "mean", "inverse_std", "shift"), ("dx", "dscale", "dbias")
)
