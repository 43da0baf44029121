"""``StopGradient``: a value that the backward pass takes for a constant, as ``tensor.detach()`` in PyTorch."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.operators.registry import Operation
from burnish.operators.semantic import SemanticOperator, like

STOP_GRADIENT = SemanticOperator("StopGradient", ("x",), ("y",), like("x"), constants=("y",), shares_memory={"y": "x"})


@STOP_GRADIENT.lowering
def stop_gradient(op: Operation) -> Tensor:
    return op.builder.op("Identity", op.required(0))
