"""The casts around what is computed in float32 in place of sixteen bits."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates

CAST_APART = EngineOperator("CastApart", ("x",), ("y",), shares_memory={"y": "x"})


@translates(CAST_APART)
def cast_apart(op: Call) -> Any:
    """A cast that stays one: see ``widening``."""
    return op.tensor().to(TORCH_DTYPES[ir.DataType(op.attribute("to"))])
