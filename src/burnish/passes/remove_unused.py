"""Removal of nodes whose outputs nothing reads, and of initializers and opsets that no node uses."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass


def remove_unused(model: ir.Model) -> ir.Model:
    """Drop, in place, what does not contribute to the graph's outputs. Inputs and outputs stay as they are."""
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    model.opset_imports.setdefault("", 18)
    return model
