"""Operators of ONNX Runtime that its tools write in the domain ``""``, in opsets in which the standard does not have them."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.graph.inference import operator_schema
from burnish.graph.protos import graphs_within
from burnish.importer.runtime_operators.registry import RUNTIME_DOMAIN

STANDARD_NAMES = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})


def hide_runtime_nodes(proto: onnx.ModelProto) -> None:
    """Move, in place, such nodes to the runtime's domain, where the check of ONNX passes over them."""
    for body in (proto, *proto.functions):
        imports = {imported.domain: imported.version for imported in body.opset_import}
        graph = proto.graph if isinstance(body, onnx.ModelProto) else body
        moved = False
        for node in (node for inside in graphs_within(graph) for node in inside.node):
            if node.op_type in STANDARD_NAMES and node.domain == "" and not _is_standard(node.op_type, imports.get("")):
                node.domain = RUNTIME_DOMAIN
                moved = True
        if moved and RUNTIME_DOMAIN not in imports:
            body.opset_import.append(onnx.helper.make_opsetid(RUNTIME_DOMAIN, 1))


def move_runtime_nodes(model: ir.Model) -> None:
    """The same for a model that is read."""
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        opset_imports = model.opset_imports if isinstance(body, ir.Graph) else body.opset_imports
        for node in body.all_nodes():
            if node.op_type in STANDARD_NAMES and node.domain == "" and not _is_standard(node.op_type, opset_imports.get("")):
                node.domain = RUNTIME_DOMAIN
                opset_imports.setdefault(RUNTIME_DOMAIN, 1)


def _is_standard(op_type: str, opset: int | None) -> bool:
    return operator_schema(op_type, onnx.defs.onnx_opset_version() if opset is None else opset) is not None
