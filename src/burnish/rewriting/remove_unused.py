"""Removal of nodes whose outputs nothing reads, and of initializers and opsets that no node uses."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from burnish.graph.uses import remove_unread_nodes


def remove_unused(model: ir.Model) -> bool:
    """Drop, in place, what does not contribute to the graph's outputs. Inputs and outputs stay as they are."""
    # The pass removes nodes too, and each takes it as long as the graph has outputs.
    changed = remove_unread_nodes(model.graph)
    changed |= RemoveUnusedNodesPass()(model).modified
    changed |= RemoveUnusedOpsetsPass()(model).modified
    model.opset_imports.setdefault("", 18)
    return changed
