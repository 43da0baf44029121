"""One spelling of the standard domain: the empty string."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import onnx
import onnx_ir as ir

from burnish.errors import ModelError


def normalize_proto_domains(proto: onnx.ModelProto) -> None:
    """The same for a proto, whose check knows only ``""``."""
    for imported in (*proto.opset_import, *(imported for function in proto.functions for imported in function.opset_import)):
        if imported.domain == "ai.onnx":
            imported.domain = ""
    _normalize_proto_nodes(proto.graph.node)
    for function in proto.functions:
        _normalize_proto_nodes(function.node)


def _normalize_proto_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        if node.domain == "ai.onnx":
            node.domain = ""
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _normalize_proto_nodes(graph.node)


def normalize_domains(model: ir.Model) -> None:
    """Spell the standard domain ``""`` wherever the model says ``"ai.onnx"``."""
    _normalize_imports(model.opset_imports)
    for function in model.functions.values():
        _normalize_imports(function.opset_imports)
        for node in function.all_nodes():
            _normalize_node(node)
    for node in model.graph.all_nodes():
        _normalize_node(node)


def _normalize_node(node: ir.Node) -> None:
    if node.domain == "ai.onnx":
        node.domain = ""


def _normalize_imports(imports: MutableMapping[str, int]) -> None:
    spelled_out = imports.pop("ai.onnx", None)
    if spelled_out is not None and imports.setdefault("", spelled_out) != spelled_out:
        raise ModelError(
            f"the model imports the standard operators in two versions: '' {imports['']} and 'ai.onnx' {spelled_out}. "
            "Export it again with one opset"
        )
