"""Which of several subgradients an operator has at a tie or a bound, noted with a node where its file follows PyTorch."""

from __future__ import annotations

import onnx_ir as ir

SUBGRADIENT = "burnish.subgradient"
"""The entry of a node's ``metadata_props``."""
FIRST = "first"
"""Of extremes along an axis, or of equal operands, the first alone has a gradient; else they share it evenly."""
INCLUSIVE = "inclusive"
"""On a bound the gradient passes, as in ``torch.clamp``; else it does not, as in ``torch.nn.functional.hardtanh``."""

WHOLE = "whole"
"""The gradient passes beyond the bound too, as where PyTorch bounds the lengths of ``cosine_similarity``."""


def subgradient_of(node: ir.Node) -> str | None:
    """Return the subgradient that is noted with a node; None for the operator's own."""
    return node.metadata_props.get(SUBGRADIENT)
