"""A program from a ``ModelProto`` with ``training_info``: here those that ``Program.to_onnx`` wrote."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import CheckpointError
from burnish.files.consistency import inconsistency
from burnish.files.digest import DIGEST, agrees, check_version
from burnish.files.metadata import TRAINING
from burnish.files.onnx_training_import import load_foreign_training
from burnish.files.training_info import FORMAT, FUNCTION_DOMAIN, FUNCTIONS, INITIALIZER_NODE, rename_values
from burnish.importer import external_tensors, forget_data_locations, load_external_data, read_proto
from burnish.program import Program
from burnish.program.signature import GRAPH_NAMES, Entry, GraphSignature, Role, Signature
from burnish.program.state import check_state
from burnish.untrusted import UNREADABLE, read_json

EXPECTED = {
    "signature": dict,
    "options": dict,
    "state": dict,
    "step": dict,
    "prefix": str,
    "opsets": dict,
    "ir_versions": dict,
    "hashes": dict,
    "semantic": dict,
}


def load_training_model(source: str | Path | onnx.ModelProto) -> Program:
    """Read a model with ``training_info``; see ``Program.load``.

    Raises:
        ModelError: the file is missing, corrupt or no ONNX model, or its external data is missing, too short or elsewhere.
        CheckpointError: the model says nothing about training, or not what a program needs.
    """
    proto, folder, name = read_proto(source)
    if folder is not None:
        load_external_data(proto, folder)
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    if TRAINING not in properties and len(proto.training_info):
        return load_foreign_training(name, proto)
    if TRAINING not in properties:
        raise CheckpointError(
            f"{name} is an ONNX model that holds no burnish program: compile it with burnish.compile, or give a file that "
            "program.to_onnx wrote"
        )
    reader = _Reader(name, proto, properties[TRAINING])
    reader.check_digest(properties.get(DIGEST), source)
    return reader.program()


class _Reader:
    def __init__(self, name: str, proto: onnx.ModelProto, metadata: str):
        self.name = name
        self.proto = proto
        self.metadata = self._metadata(metadata)

    def check_digest(self, digest: str | None, source: str | Path | onnx.ModelProto) -> None:
        is_file = not isinstance(source, onnx.ModelProto)
        if agrees(digest, Path(source).read_bytes() if is_file else self.proto.SerializeToString(deterministic=True)):
            return
        in_one_piece = onnx.ModelProto()
        in_one_piece.CopyFrom(self.proto)
        forget_data_locations(in_one_piece)
        if not agrees(digest, in_one_piece.SerializeToString(deterministic=True)):
            raise self._damaged("it has changed since it was written")

    def program(self) -> Program:
        self.signature = self._signature()
        if len(self.proto.training_info) != 1:
            raise self._damaged(f"it has {len(self.proto.training_info)} training_info, and one was written")
        self.algorithm = self.proto.training_info[0].algorithm
        state = self._state()
        models: dict[str, Any] = {name: self._model(name) for name in GRAPH_NAMES}
        problem = inconsistency(self.signature, models, self.metadata["options"])
        if problem is not None:
            raise self._damaged(problem)
        weights = {
            entry.name: state[entry.name] for entry in self.signature.state if entry.role in (Role.PARAMETER, Role.STATISTIC)
        }
        options = dict(self.metadata["options"])
        semantic = {name: self._unpacked(name, text) for name, text in self.metadata["semantic"].items()}
        program = Program(**models, semantic=semantic, signature=self.signature, weights=weights, options=options)
        program.saved_state = state
        return program

    def _metadata(self, text: str) -> dict[str, Any]:
        try:
            metadata = read_json(text)
            if metadata["format"] != FORMAT:
                raise ValueError(f"format is {metadata['format']!r}, expected {FORMAT!r}")
            check_version(
                metadata["version"], self.name, "make it again from the model, with burnish compile MODEL -o program.onnx"
            )
        except UNREADABLE as error:
            raise self._damaged(f"its metadata '{TRAINING}' cannot be read: {error!r}") from error
        for key, kind in EXPECTED.items():
            if not isinstance(metadata.get(key), kind):
                raise self._damaged(f"its metadata '{TRAINING}' has no '{key}'")
        return metadata

    def _signature(self) -> Signature:
        try:
            signature = Signature.from_dict(self.metadata["signature"])
        except UNREADABLE as error:
            raise self._damaged(f"the signature in its metadata cannot be read: {error!r}") from error
        if set(signature) != set(GRAPH_NAMES):
            raise self._damaged(f"its signature has the graphs {sorted(signature)}, expected {sorted(GRAPH_NAMES)}")
        return signature

    def _state(self) -> dict[str, np.ndarray]:
        tensors = {tensor.name: tensor for tensor in (*self.proto.graph.initializer, *self.algorithm.initializer)}
        names = self.metadata["state"]
        state = {}
        for entry in self.signature.state:
            tensor = tensors.get(names.get(entry.name, ""))
            if tensor is None:
                raise self._damaged(f"it has no initializer that holds '{entry.name}'")
            state[entry.name] = ir.from_proto(tensor).numpy().copy()
        check_state(self.signature.state, state, CheckpointError, self.name, "Write the model again, or use another copy")
        return state

    def _model(self, name: str) -> ir.Model:
        graph = onnx.GraphProto()
        if name == "predict":
            graph.CopyFrom(self.proto.graph)
            self._take_state_out(graph)
        elif name == "init":
            graph.CopyFrom(self.proto.training_info[0].initialization)
            inputs = {entry.name for entry in self.signature["init"].inputs}
            _keep_initializers(graph, lambda tensor: tensor.name not in inputs)
        elif name == "step":
            graph.CopyFrom(self.algorithm)
            self._restore_names(graph)
        else:
            self._read_function(name, graph)
        graph.name = name
        self._declare(graph, self.signature[name])
        return self._checked(name, graph)

    def _unpacked(self, name: str, text: str) -> ir.Model:
        try:
            model = ir.from_proto(onnx.ModelProto.FromString(base64.b64decode(text, validate=True)))
            if outside := [tensor.location for _, tensor in external_tensors(model)]:
                raise ValueError(f"it reads the file '{outside[0]}'")
            return model
        except Exception as error:  # the protobuf library's errors are not those of onnx_ir
            raise self._damaged(f"its {name} graph for engines with kernels cannot be read: {error}") from error

    def _take_state_out(self, graph: onnx.GraphProto) -> None:
        names = {initializer: state for state, initializer in self.metadata["state"].items()}
        names = {tensor.name: names[tensor.name] for tensor in graph.initializer if tensor.name in names}
        _keep_initializers(graph, lambda tensor: tensor.name not in names)
        rename_values(graph, lambda value: names.get(value, value), lambda node: node)

    def _restore_names(self, graph: onnx.GraphProto) -> None:
        prefix, names = self.metadata["prefix"], {value: name for name, value in self.metadata["step"].items()}
        others = {self.metadata["state"].get(entry.name) for entry in self.signature.state}
        _keep_initializers(graph, lambda tensor: tensor.name not in names and tensor.name not in others)
        rename_values(graph, lambda value: names.get(value, value.removeprefix(prefix)), lambda node: node.removeprefix(prefix))

    def _read_function(self, name: str, graph: onnx.GraphProto) -> None:
        found = [function for function in self.proto.functions if (function.domain, function.name) == (FUNCTION_DOMAIN, name)]
        if len(found) != 1 or name not in FUNCTIONS:
            raise self._damaged(f"it has {len(found)} functions '{FUNCTION_DOMAIN}.{name}', and one was written")
        for node in found[0].node:
            if node.op_type == "Constant" and node.name.startswith(INITIALIZER_NODE) and node.attribute:
                graph.initializer.add().CopyFrom(node.attribute[0].t)
                graph.initializer[-1].name = node.output[0]
            else:
                graph.node.append(node)
        graph.value_info.extend(found[0].value_info)

    def _declare(self, graph: onnx.GraphProto, signature: GraphSignature) -> None:
        del graph.input[:]
        del graph.output[:]
        graph.input.extend(_value_info(entry) for entry in signature.inputs)
        graph.output.extend(_value_info(entry) for entry in signature.outputs)

    def _checked(self, name: str, graph: onnx.GraphProto) -> ir.Model:
        try:
            model = onnx.helper.make_model(
                graph, opset_imports=[onnx.helper.make_opsetid("", int(self.metadata["opsets"][name]))]
            )
            model.ir_version = int(self.metadata["ir_versions"][name])
            if name == "predict":
                properties = {
                    entry.key: entry.value for entry in self.proto.metadata_props if entry.key not in (TRAINING, DIGEST)
                }
                onnx.helper.set_model_props(model, properties)
            onnx.checker.check_model(model)
            return ir.from_proto(model)
        except Exception as error:  # the checker's errors share no base class with those of onnx_ir
            raise self._damaged(f"its {name} graph is not valid: {str(error).strip()}") from error

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.name} is not a whole model that program.to_onnx wrote: {what}. Write it again, or use another copy"
        )


def _keep_initializers(graph: onnx.GraphProto, keep: Any) -> None:
    kept = [tensor for tensor in graph.initializer if keep(tensor)]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _value_info(entry: Entry) -> onnx.ValueInfoProto:
    shape = None if entry.shape is None else list(entry.shape)
    return onnx.helper.make_tensor_value_info(entry.name, int(entry.dtype), shape)
