"""Bounds of Range that are vectors of one number become scalars, as the standard asks for.

Runtimes take both, and so the standard's own function of AffineGrid has them.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder


def make_bounds_scalars(model: ir.Model) -> bool:
    """Reshape, in place, what Range nodes read of shape [1]; return whether there was any.

    For a model of opset 11 or newer, whose shapes are inferred.
    """
    changed = False
    for node in model.graph.all_nodes():
        if node.op_type != "Range" or node.domain != "" or node.graph is None:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.shape == [1]:
                builder = Builder(node.graph, before=node)
                node.replace_input_with(index, builder.op("Reshape", builder.tensor(value), builder.integers([])).value)
                changed = True
    return changed
