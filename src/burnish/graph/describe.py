"""How a node is named in an error: operator, node name and first output."""

from __future__ import annotations

import onnx_ir as ir


def describe_node(node: ir.Node) -> str:
    """Return ``Conv 'layer1/conv' (output 'layer1_out')``: what a reader needs to find the node in a viewer."""
    operator = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    name = f" '{node.name}'" if node.name else ""
    output = next((value.name for value in node.outputs if value.name), None)
    return f"{operator}{name}" + (f" (output '{output}')" if output else "")
