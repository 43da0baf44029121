"""Brings a model from the opset that it was written in to one that burnish works with, change by change (``opset_changes``)."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.protos import graphs_within
from burnish.importer.opset_changes import CHANGES

OLDEST_READ = 7
OLDEST_CANONICAL = 18


def check_opset(model: ir.Model) -> None:
    """Raise ModelError for an opset before 7, or one that the installed ``onnx`` does not know yet."""
    newest = onnx.defs.onnx_opset_version()
    imports = [model.opset_imports, *(function.opset_imports for function in model.functions.values())]
    if "" not in model.opset_imports:
        versions = [imported[""] for imported in imports if "" in imported]
        model.opset_imports[""] = max(versions, default=OLDEST_CANONICAL)
    for imported in imports:
        opset = imported.get("", newest)
        if opset < OLDEST_READ:
            raise ModelError(
                f"the model is of opset {opset}, and burnish reads {OLDEST_READ} to {newest}: export it again, or convert it "
                "with onnx.version_converter"
            )
        if opset > newest:
            raise ModelError(
                f"the model is of opset {opset}, and the installed onnx {onnx.__version__} knows {newest} at most: "
                "update onnx, or export the model with an older opset"
            )


def declare_opset(model: ir.Model) -> None:
    """Let every body declare the model's opset, in place: what emits nodes into a graph asks that graph for it."""
    for graph in model.graphs():
        graph.opset_imports[""] = model.opset_imports[""]


def upgrade_opset(model: ir.Model) -> bool:
    """Rewrite, in place, a model of an opset before 18 in opset 18; newer ones stay as they are. Returns whether it was one.

    Raises:
        UnsupportedOperatorError: an operator in an old form that has no equivalent in the new opset.
    """
    opset = model.opset_imports[""]
    target = max(opset, OLDEST_CANONICAL)
    upgrade_graph(model.graph, opset, target)
    model.opset_imports[""] = target
    declare_opset(model)
    # Upgraded graphs may use types that older files cannot declare; ir_version 8 came with opset 15 to 18.
    model.ir_version = max(model.ir_version, 8)
    return opset < target


def upgrade_graph(graph: ir.Graph, opset: int, target: int) -> None:
    """Rewrite, in place, the nodes of a graph and its subgraphs from one opset to a newer one, change by change."""
    if opset >= target:
        return
    for node in list(graph.all_nodes()):
        if node.domain != "":
            continue
        for version in range(opset + 1, target + 1):
            change = CHANGES.get((node.op_type, version))
            if change is not None:
                change(node)


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
