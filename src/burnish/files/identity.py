"""Identify programs and graphs by hashes of their computations, and find the state that checkpoints may leave out."""

from __future__ import annotations

import hashlib
import json

import onnx
import onnx_ir as ir

from burnish.adapters.graph import read_adapters
from burnish.graph import model_proto
from burnish.graph.protos import graphs_within
from burnish.program import Program, Role, Signature


def graph_hashes(program: Program) -> dict[str, str]:
    """Return a SHA-256 of each graph: its operators, constants, inputs and outputs, but not its documentation."""
    return {name: graph_hash(model) for name, model in program.graphs.items()}


def adapter_base(program: Program) -> tuple[str, ...]:
    """Return the state entries that do not change while adapters train: weights, and statistics of frozen layers.

    Empty for a program without adapters: its checkpoints hold the whole state, even if some of it is frozen.
    """
    if not read_adapters(program.metadata):
        return ()
    trained = {f"param/{name}" for name in program.options.get("trainable", ())}
    updated = trained | {*program.signature["grad"].updates, *program.signature["step"].updates}
    still = (entry for entry in program.signature.state if entry.role in (Role.PARAMETER, Role.STATISTIC))
    return tuple(entry.name for entry in still if entry.name not in updated)


def program_hash(hashes: dict[str, str], signature: Signature) -> str:
    """Return the SHA-256 that identifies a program: its graphs and signature.

    It ignores defaults of hyperparameters, which every step may override, and the end of a schedule, which changes no step.
    """
    values = signature.to_dict()
    for graph in values.values():
        graph.pop("end", None)
        for entry in graph["inputs"]:
            entry.pop("default", None)
    return hashlib.sha256(json.dumps([hashes, values], sort_keys=True).encode()).hexdigest()


def graph_hash(model: ir.Model) -> str:
    """Return the SHA-256 of one graph; see ``graph_hashes``."""
    return proto_hash(model_proto(model))


def proto_hash(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of a graph with all tensors in the proto; the proto is modified."""
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted((entry.domain, entry.version) for entry in model.opset_import)).encode())
    proto = model.graph
    for field in ("name", "doc_string", "value_info", "metadata_props", "quantization_annotation"):
        proto.ClearField(field)
    _forget_remarks(proto)
    for value in (*proto.input, *proto.output):
        value.ClearField("doc_string")
        value.ClearField("metadata_props")
    for node in proto.node:
        digest.update(node.SerializeToString(deterministic=True))
    for initializer in proto.initializer:
        digest.update(initializer.SerializeToString(deterministic=True))
    proto.ClearField("node")
    proto.ClearField("initializer")
    digest.update(proto.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _forget_remarks(graph: onnx.GraphProto) -> None:
    """Clear documentation and metadata of nodes, also in bodies, and names of tensors, which reading a constant may add."""
    for node in (node for body in graphs_within(graph) for node in body.node):
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.ClearField("name")
