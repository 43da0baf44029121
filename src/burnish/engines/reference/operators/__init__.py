"""Operators in numpy that take the place of the standard's evaluator's own, one file per family.

Here is what that evaluator has wrong, in part, or in fewer digits than its operands hold: each operator by its definition in the
standard, in the dtype of its operands, or in float32 where those have sixteen bits. What it has right is not here.
"""

from onnx.reference.op_run import OpRun

from burnish.engines.reference.operators.activation import Erf, Gelu, HardSwish, LogSoftmax, Mean, Softsign
from burnish.engines.reference.operators.attention import Attention
from burnish.engines.reference.operators.control import Loop, Scan
from burnish.engines.reference.operators.convolution import Conv, ConvTranspose
from burnish.engines.reference.operators.indexing import GatherElements, Pad, Unique
from burnish.engines.reference.operators.normalization import (
    LRN,
    GroupNormalization,
    LayerNormalization,
    LpNormalization,
    MeanVarianceNormalization,
)
from burnish.engines.reference.operators.pooling import (
    AveragePool,
    GlobalLpPool,
    GlobalMaxPool,
    LpPool,
    MaxPool,
    MaxUnpool,
)
from burnish.engines.reference.operators.quantization import DequantizeLinear
from burnish.engines.reference.operators.reduction import ReduceLogSumExp
from burnish.engines.reference.operators.resize import Resize
from burnish.engines.reference.operators.sampling import AffineGrid, DeformConv, GridSample, MaxRoiPool

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
