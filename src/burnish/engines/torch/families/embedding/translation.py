"""Sums of the gradients of a table's rows, and lookups in many tables, each as one call of the engine's kernel."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.translate.rules import Call, translates
from burnish.operators.row_gradients import COALESCE_ROWS

FUSED_COALESCE_ROWS = EngineOperator("FusedCoalesceRows", COALESCE_ROWS.inputs, COALESCE_ROWS.outputs)
FUSED_LOOKUPS = EngineOperator("FusedLookups", ("tables and indices...",), ("rows...",))


@translates(FUSED_COALESCE_ROWS)
def coalesce_rows(op: Call) -> Any:
    results = torch.ops.burnish.coalesce_rows.default(op.tensor(0), op.tensor(1))
    return results[0], results[1]


@translates(FUSED_LOOKUPS)
def lookups(op: Call) -> Any:
    """Tables, and after them as many tensors of indices -> rows of each."""
    operands = op.tensors()
    count = len(operands) // 2
    rows = torch.ops.burnish.lookup_rows.default(operands[:count], operands[count:])
    return tuple(rows[place] for place in range(count))
