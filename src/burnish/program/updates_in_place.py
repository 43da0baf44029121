"""The outputs of a step that take no memory of their own on ONNX Runtime: next values that are written over present ones."""

from __future__ import annotations

import onnx_ir as ir

from burnish.analysis.in_place import is_large, written_in_place
from burnish.program.signature import GraphSignature


def outputs_in_place(apply: ir.Model, signature: GraphSignature) -> frozenset[str]:
    """Return the outputs of ``step`` that are written over the present values; none where the state is small.

    Args:
        apply: the graph that updates the state.
        signature: its signature.
    """
    if not is_large(signature.updated_bytes):
        return frozenset()
    updates = {entry.updates: entry.name for entry in signature.outputs if entry.updates is not None and not entry.by_rows}
    return frozenset(updates[entry] for entry in written_in_place(apply.graph, updates))
