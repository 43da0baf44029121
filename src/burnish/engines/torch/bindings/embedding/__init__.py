"""Embedding tables: rows looked up, gradients of the same row added up, and updates of these rows alone, in place."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.native.kernels import declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.indexing import FUSED_COALESCE_ROWS, FUSED_LOOKUPS

declare_kernel(
    "rows",
    "coalesce_rows(Tensor indices, Tensor rows) -> (Tensor, Tensor)",
    "lookup_rows(Tensor[] tables, Tensor[] indices) -> Tensor[]",
    "update_rows_(Tensor(a!)[] tensors, Tensor plan, Tensor constants) -> ()",
)


calls_kernel(FUSED_COALESCE_ROWS, "coalesce_rows")


@translates(FUSED_LOOKUPS)
def lookups(op: Call) -> Any:
    """Tables, and after them as many tensors of indices -> rows of each."""
    operands = op.tensors()
    count = len(operands) // 2
    rows = torch.ops.burnish.lookup_rows.default(operands[:count], operands[count:])
    return tuple(rows[place] for place in range(count))
