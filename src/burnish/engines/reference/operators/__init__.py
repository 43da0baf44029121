"""Operators in numpy that take the place of the standard's evaluator's own, one file per family.

Here is what that evaluator has wrong, in part, or in fewer digits than its operands hold: each operator by its definition in the
standard, in the dtype of its operands, or in float32 where those have sixteen bits. What it has right is not here.
"""

from onnx.reference.op_run import OpRun

from burnish.engines.reference.operators.control import Loop, Scan
from burnish.engines.reference.operators.elements import (
    Attention,
    DequantizeLinear,
    Erf,
    Gelu,
    HardSwish,
    LogSoftmax,
    Mean,
    ReduceLogSumExp,
    Softsign,
)
from burnish.engines.reference.operators.images import (
    AffineGrid,
    AveragePool,
    Conv,
    ConvTranspose,
    DeformConv,
    GlobalLpPool,
    GlobalMaxPool,
    GridSample,
    LpPool,
    MaxPool,
    MaxRoiPool,
    MaxUnpool,
    Resize,
)
from burnish.engines.reference.operators.indexing import GatherElements, Pad, Unique
from burnish.engines.reference.operators.normalization import (
    LRN,
    GroupNormalization,
    LayerNormalization,
    LpNormalization,
    MeanVarianceNormalization,
)

OPERATORS: list[type[OpRun]] = [
    AffineGrid,
    Attention,
    AveragePool,
    Conv,
    ConvTranspose,
    DeformConv,
    DequantizeLinear,
    Erf,
    GatherElements,
    Gelu,
    GlobalLpPool,
    GlobalMaxPool,
    GridSample,
    GroupNormalization,
    HardSwish,
    LRN,
    LayerNormalization,
    LogSoftmax,
    Loop,
    LpNormalization,
    LpPool,
    MaxPool,
    MaxRoiPool,
    MaxUnpool,
    Mean,
    MeanVarianceNormalization,
    Pad,
    ReduceLogSumExp,
    Resize,
    Scan,
    Softsign,
    Unique,
]

__all__ = ["OPERATORS"]
