"""The outputs of a step that take no memory of their own on ONNX Runtime: next values that are written over present ones."""

from __future__ import annotations

import onnx_ir as ir

from burnish.analysis.in_place import written_in_place
from burnish.program.signature import GRADIENT_ROLES, GraphSignature

LEAST_SAVED = 1 << 25
"""Bytes from which on updates in place are worth two graphs in a step. They save a second set of what is updated, and keep the
gradients of all parameters until the last one is computed."""


def is_updated_in_place(apply: GraphSignature) -> bool:
    """Whether a step of a program, of which this is the signature of ``apply``, writes over the present state."""
    updated = sum(entry.bytes for entry in apply.outputs if entry.updates is not None and not entry.by_rows)
    return updated - sum(entry.bytes for entry in apply.inputs_of(*GRADIENT_ROLES)) >= LEAST_SAVED


def outputs_in_place(apply: ir.Model, signature: GraphSignature) -> frozenset[str]:
    """Return the outputs of ``step`` that are written over the present values; none where that saves too little.

    Args:
        apply: the graph that updates the state.
        signature: its signature.
    """
    if not is_updated_in_place(signature):
        return frozenset()
    updates = {entry.updates: entry.name for entry in signature.outputs if entry.updates is not None and not entry.by_rows}
    return frozenset(updates[entry] for entry in written_in_place(apply.graph, updates))
