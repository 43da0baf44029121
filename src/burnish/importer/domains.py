"""One spelling of the standard domain: the empty string."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.protos import graphs_within


def normalize_proto_domains(proto: onnx.ModelProto) -> None:
    """The same for a proto, whose check knows only ``""``."""
    for imported in (*proto.opset_import, *(imported for function in proto.functions for imported in function.opset_import)):
        if imported.domain == "ai.onnx":
            imported.domain = ""
    for node in (node for graph in graphs_within(proto.graph, *proto.functions) for node in graph.node):
        if node.domain == "ai.onnx":
            node.domain = ""


def normalize_domains(model: ir.Model) -> None:
    """Spell the standard domain ``""`` where the model imports ``"ai.onnx"``; ``onnx_ir`` spells it so in nodes.

    Raises:
        ModelError: the model imports it by both names, in two versions.
    """
    for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
        spelled_out = imports.pop("ai.onnx", None)
        if spelled_out is not None and imports.setdefault("", spelled_out) != spelled_out:
            raise ModelError(
                f"the model imports the standard operators in two versions: '' {imports['']} and 'ai.onnx' {spelled_out}. "
                "Export it again with one opset"
            )
