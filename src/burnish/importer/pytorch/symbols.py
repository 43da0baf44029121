"""Names for the open axes of an exported graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from burnish.importer.pytorch.layers import is_user_input

BATCH = "batch"


def symbol_names(program: torch.export.ExportedProgram, shapes: Any) -> dict[str, str]:
    """Return the names that the symbols of a graph are to have: those that the user gave, and ``batch``.

    Args:
        program: the graph.
        shapes: the open axes of each parameter of ``forward``, as ``torch.export.export`` takes them.
    """
    names: dict[str, str] = {}
    specs = pytree.tree_leaves(
        shapes, is_leaf=lambda node: node is None or (isinstance(node, dict) and all(isinstance(key, int) for key in node))
    )
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [placeholders[spec.arg.name] for spec in program.graph_signature.input_specs if is_user_input(spec)]
    for axes, node in zip(specs, inputs, strict=False):
        value = node.meta.get("val")
        for axis, dimension in axes.items() if isinstance(axes, dict) and isinstance(value, torch.Tensor) else ():
            size = value.shape[axis]
            if isinstance(size, torch.SymInt) and (symbol := str(size)).isidentifier():
                given = getattr(dimension, "__name__", None)
                if given is not None:
                    names[symbol] = given
                elif axis == 0:
                    names.setdefault(symbol, BATCH)
    return _apart(names)


def _apart(names: dict[str, str]) -> dict[str, str]:
    """Number names that several symbols would have."""
    taken: dict[str, int] = {}
    result = {}
    for symbol, name in names.items():
        taken[name] = taken.get(name, 0) + 1
        result[symbol] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return result
