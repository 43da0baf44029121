"""Products with a weight, their gradients, and products of batches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.families.linear import products
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates

FUSED_LINEAR = EngineOperator("FusedLinear", ("x", "w", "b"), ("y",))
FUSED_LINEAR_GRAD = EngineOperator("FusedLinearGrad", ("dy", "x", "w"), ("dx", "dw", "db"))
FUSED_BATCHED_PRODUCT = EngineOperator("FusedBatchedProduct", ("left", "right"), ("y",))


@translates(FUSED_LINEAR)
def linear(op: Call) -> Any:
    products.expect(op.extents(1), TORCH_DTYPES[op.dtype(0)])
    if op.rank(0) == 2 and op.dtype(0) == ir.DataType.FLOAT:
        products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "relu")]
    return products.linear(op.tensor(0), op.tensor(1), op.optional(2), *flags)


@translates(FUSED_LINEAR_GRAD)
def linear_gradients(op: Call) -> Any:
    """(dy, x, weight or nothing) -> dx, dw, db."""
    if op.dtype(0) == ir.DataType.FLOAT:
        products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "swapped", "relu", "bias")]
    results = products.linear_gradients(op.tensor(0), op.tensor(1), op.optional(2), *flags)
    return tuple(results[index] if op.is_read(index) else None for index in range(3))


@translates(FUSED_BATCHED_PRODUCT)
def batched_product(op: Call) -> Any:
    return products.batched(op.tensor(0), op.tensor(1), list(op.attribute("perm")))
