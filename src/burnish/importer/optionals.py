"""Optional values of which it is known what they hold become that."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, remove_node, replace_node
from burnish.graph.uses import is_read, producer_of


def resolve_optionals(model: ir.Model) -> bool:
    """Replace, in place, what reads an optional value that is made in the model, or a plain one; return whether anything was.

    An optional value that is an input, or that a branch gives, may be empty when the model runs: it stays.
    """
    resolved = False
    for node in list(model.graph.all_nodes()):
        graph = node.graph
        if node.domain != "" or node.op_type not in ("OptionalGetElement", "OptionalHasElement"):
            continue
        assert isinstance(graph, ir.Graph)
        is_known, held = _held(node.inputs[0] if node.inputs else None)
        if not is_known or (held is None and node.op_type == "OptionalGetElement"):
            continue
        graph.opset_imports.update(model.graph.opset_imports)
        builder = Builder(graph, before=node)
        if node.op_type == "OptionalHasElement":
            replace_node(node, builder.constant(np.asarray(held is not None)))
        else:
            assert held is not None
            replace_node(node, builder.op("Identity", builder.tensor(held), like=builder.tensor(held)))
        resolved = True
    if resolved:
        for node in reversed(list(model.graph.all_nodes())):
            if node.op_type == "Optional" and node.domain == "" and not is_read(node):
                remove_node(node)
    return resolved


def hold_optional_inputs(model: ir.Model) -> bool:
    """Make optional inputs plain tensors, in place, and optional outputs that hold a tensor that tensor; return whether any was.

    A batch has all inputs of a program.
    """
    changed = False
    for value in model.graph.inputs:
        if isinstance(value.type, ir.OptionalType) and isinstance(value.type.elem_type, ir.TensorType):
            value.type, changed = value.type.elem_type, True
    for position, output in enumerate(model.graph.outputs):
        made = producer_of(output, "Optional")
        held = made.inputs[0] if made is not None and made.inputs else None
        if held is None or not isinstance(held.type, ir.TensorType):
            continue
        builder = Builder(model.graph)
        tensor = builder.tensor(held)
        plain = builder.op("Identity", tensor, like=tensor).value
        name, output.name = output.name, f"{output.name}:optional"
        plain.name, model.graph.outputs[position], changed = name, plain, True
    return changed


def _held(value: ir.Value | None) -> tuple[bool, ir.Value | None]:
    """Whether it is known what a value holds, and the value that it holds; None for nothing."""
    if value is None:
        return True, None
    made = producer_of(value, "Optional")
    if made is not None:
        return True, made.inputs[0] if made.inputs else None
    return not isinstance(value.type, ir.OptionalType) and value.type is not None, value
