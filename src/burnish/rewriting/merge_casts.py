"""One cast per value and dtype: the backward of a value that several casts read casts its cotangents apart."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import attribute_value, remove_node, replace_value


def merge_casts(model: ir.Model) -> bool:
    """Let every reader of a value in another dtype read the first cast to it, in place; later ones are removed."""
    changed = False
    first: dict[tuple[ir.Value | None, int, int], ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Cast" or node.domain != "" or set(node.attributes) - {"to", "saturate"}:
            continue
        key = (node.inputs[0], node.attributes["to"].as_int(), attribute_value(node, "saturate", 1))
        earlier = first.setdefault(key, node.outputs[0])
        if earlier is not node.outputs[0] and not node.outputs[0].is_graph_output():
            replace_value(node.outputs[0], earlier)
            remove_node(node)
            changed = True
    return changed
