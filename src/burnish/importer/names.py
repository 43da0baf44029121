"""Names: every node and value has one, and none is used twice, in subgraphs either."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from burnish.graph import Names
from burnish.graph.uses import is_used


def name_everything(model: ir.Model) -> None:
    """Give, in place, names to nodes and values without one, and new names to those whose name is taken.

    Inputs, outputs and initializers of the main graph keep theirs.
    """
    graph = model.graph
    fixed = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    taken = Names(value.name for value in fixed)
    settled = set(fixed)
    node_names = Names()
    for node in graph.all_nodes():
        node.name = node_names.take(node.name or node.op_type)
    for inner in model.graphs():
        values = [*inner.inputs, *inner.initializers.values(), *(output for node in inner for output in node.outputs)]
        _name_values((value for value in values if value not in settled), taken)
    for value in fixed:
        if not value.name:
            value.name = taken.take("value")


def _name_values(values: Iterable[ir.Value], taken: Names) -> None:
    for value in values:
        if not value.name:
            if is_absent(value):
                continue
            producer = value.producer()
            value.name = taken.take(f"{producer.name}_output_{value.index()}" if producer is not None else "value")
        else:
            value.name = taken.take(value.name)


def is_absent(value: ir.Value) -> bool:
    """Whether a value is an optional output that the node leaves out: without a name and without a use."""
    return not value.name and not is_used(value)
