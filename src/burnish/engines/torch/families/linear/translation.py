"""Products with a weight, their gradients, and products of batches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from burnish.engines.torch.families.linear import products
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import BURNISH_DOMAIN


@translates("FusedLinear", domain=BURNISH_DOMAIN)
def linear(op: Call) -> Any:
    products.expect(op.extents(1), TORCH_DTYPES[op.dtype(0)])
    if op.rank(0) == 2 and op.dtype(0) == ir.DataType.FLOAT:
        products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "relu")]
    return products.linear(op.tensor(0), op.tensor(1), op.optional(2), *flags)


@translates("FusedLinearWeightGrad", domain=BURNISH_DOMAIN)
def linear_weight_gradient(op: Call) -> Any:
    return products.linear_weight_gradient(op.tensor(0), op.tensor(1))


@translates("FusedLinearGrad", domain=BURNISH_DOMAIN)
def linear_gradients(op: Call) -> Any:
    """(dy, x, weight or nothing) -> dx, dw, db."""
    products.expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "swapped", "relu", "bias")]
    results = products.linear_gradients(op.tensor(0), op.tensor(1), op.optional(2), *flags)
    return tuple(results[index] if op.is_read(index) else None for index in range(3))


@translates("FusedBatchedProduct", domain=BURNISH_DOMAIN)
def batched_product(op: Call) -> Any:
    return products.batched(op.tensor(0), op.tensor(1), list(op.attribute("order")))
