"""A program as one ``ModelProto``: the inference graph, and a ``TrainingInfoProto`` for a step.

==================  ========================================================================================================
``graph``           predict, with the weights and statistics as initializers under the source's names, for any runtime
``initialization``  init, with the seed as a constant
``algorithm``       step, appended to ``graph`` as in the standard: it reads its inputs and initializers by name, and has
                    initializers of its own for optimizer state, key and step
``functions``       grad, apply and evaluate, which no node calls: for burnish and for people
``metadata_props``  a digest of the whole; the signature and the options, as JSON; the entries of an exported model
==================  ========================================================================================================
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.errors import CheckpointError, UnsupportedOperatorError
from burnish.files.consistency import inconsistency
from burnish.files.digest import BLANK, DIGEST, FORMAT_VERSION, agrees, check_version, digest_text
from burnish.files.export import export_inference
from burnish.files.file_writing import file_path, replacing
from burnish.files.identity import adapter_base, graph_hashes, program_hash
from burnish.files.metadata import TRAINING
from burnish.files.model_file import constant_bytes, require_valid
from burnish.files.onnx_training_import import load_foreign_training
from burnish.graph import model_proto
from burnish.graph.protos import graphs_within
from burnish.graph.versions import raise_opset
from burnish.importer import external_tensors, forget_data_locations, load_external_data, read_proto
from burnish.importer.file_tensors import without_payloads
from burnish.program import Program
from burnish.program.signature import GRAPH_NAMES, Entry, GraphSignature, Role, Signature
from burnish.program.state import check_state
from burnish.untrusted_files import UNREADABLE, read_json

FORMAT = "burnish training"
FUNCTION_DOMAIN = "burnish.program"
FUNCTIONS = ("grad", "apply", "evaluate")
PREFIX = "training/"
INITIALIZER_NODE = "initializer:"
"""Nodes with this prefix hold initializers, because a function cannot have any."""

LARGEST = 2**31 - 2**20
"""Maximal bytes of tensors, which leaves room for the graphs; a protobuf is limited to 2 GiB."""


def to_training_model(
    program: Program, state: Mapping[str, np.ndarray] | None = None, properties: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """Write a program and its state as one model; see ``Program.to_onnx``."""
    if program.features is not None:
        raise CheckpointError(
            "One ONNX file cannot hold a program with cached features: save it in a folder (a path without .onnx)"
        )
    if state is None:
        state = program.initial_state()
    check_state(program.signature.state, state, CheckpointError, "The state", "Pass the state of a session of this program")
    inference = export_inference(
        program, state, fold_norm=False, metadata=properties, round_weights=False, merge=False, settle=False
    )
    _check_size(program, state, inference)
    opset = max(model.opset_imports[""] for model in program.graphs.values())
    graphs = {name: _graph_proto(model, opset) for name, model in program.graphs.items() if name != "predict"}
    model = onnx.ModelProto()
    model.ir_version = max(graph.ir_version for graph in program.graphs.values())
    model.producer_name = "burnish"
    model.opset_import.append(onnx.helper.make_opsetid("", opset))
    model.graph.CopyFrom(_graph_proto(inference, opset))
    naming = _Naming(program, model.graph)
    info = model.training_info.add()
    info.initialization.CopyFrom(_initialization(program, graphs["init"], state))
    info.algorithm.CopyFrom(_algorithm(program, graphs["step"], state, naming))
    _bind(info.initialization_binding, program.signature["init"], naming.state, lambda entry: entry.name)
    _bind(info.update_binding, program.signature["step"], naming.state, lambda entry: naming.step[entry.name])
    for name in FUNCTIONS:
        model.functions.append(_function(name, graphs[name], opset))
    hashes = graph_hashes(program)
    metadata = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "signature": program.signature.to_dict(),
        "options": program.options,
        "state": naming.state,
        "step": naming.step,
        "prefix": naming.prefix,
        "opsets": {name: graph.opset_imports[""] for name, graph in program.graphs.items()},
        "hashes": hashes,
        "program": program_hash(hashes, program.signature),
        "base": list(adapter_base(program)),
        "ir_versions": {name: graph.ir_version for name, graph in program.graphs.items()},
        "semantic": {name: _packed(graph) for name, graph in program.semantic.items()},
    }
    own = {DIGEST: BLANK, TRAINING: json.dumps(metadata, sort_keys=True)}
    onnx.helper.set_model_props(model, {**own, **inference.metadata_props})
    model.metadata_props[0].value = digest_text(hashlib.sha256(model.SerializeToString(deterministic=True)))
    return model


def _packed(graph: ir.Model) -> str:
    """Return a graph with nonstandard operators, which other runtimes need not understand, as text."""
    return base64.b64encode(model_proto(graph).SerializeToString(deterministic=True)).decode()


def write_training_model(model: onnx.ModelProto, path: str | os.PathLike[str]) -> Path:
    """Write a model atomically, replacing an earlier one; missing folders are created.

    Raises:
        CheckpointError: the file cannot be written, or is one that this function did not write; it is unchanged.
        ModelError: the model is not valid ONNX.
    """
    path = file_path(path, "program.onnx")
    if path.exists() and not _is_training_model(path):
        raise CheckpointError(
            f"'{path}' is a file that is no saved program, and is not replaced: save the program under another name, or as a "
            "folder"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"'{path.parent}' could not be created: {error}. Choose a folder you can write to") from error
    require_valid(without_payloads(model), f"'{path}'")
    with replacing(path) as partial:
        partial.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _is_training_model(path: Path) -> bool:
    try:
        properties = onnx.ModelProto.FromString(path.read_bytes()).metadata_props
    except Exception:  # protobuf errors have no class of their own; a file that is not ONNX is not a training model either
        return False
    return any(entry.key == TRAINING for entry in properties)


class _Naming:
    """Names of the step's values and the program's state in the file.

    Attributes:
        prefix: prefix of every value that only the step computes, unused in the inference graph.
        state: state name -> initializer.
        step: input or output of the step graph -> value of the file.
    """

    def __init__(self, program: Program, inference: onnx.GraphProto):
        taken = set(names_of(inference))
        self.prefix = PREFIX
        while any(name.startswith(self.prefix) for name in taken):
            self.prefix = f"_{self.prefix}"
        initializers = {tensor.name for tensor in inference.initializer}
        self.state = {}
        for entry in program.signature.state:
            name = entry.name.partition("/")[2]
            is_weight = entry.role in (Role.PARAMETER, Role.STATISTIC) and name in initializers
            self.state[entry.name] = name if is_weight else self._free(entry.name, taken)
        signature = program.signature["step"]
        data = {entry.name for entry in signature.inputs_of(Role.DATA)}
        self.step = {}
        for entry in (*signature.inputs, *signature.outputs):
            kept = entry.name if entry.name in data else self._free(entry.name, taken)
            self.step[entry.name] = self.state.get(entry.name, kept)

    def _free(self, name: str, taken: set[str]) -> str:
        return self.prefix + name if name in taken else name

    def rename(self, name: str) -> str:
        """Return the name in the file of any value of the step graph."""
        return self.step.get(name, self.prefix + name if name else "")


def names_of(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every name that a graph gives to a value, also in subgraphs."""
    for body in graphs_within(graph):
        yield from (value.name for value in (*body.input, *body.initializer))
        yield from (name for node in body.node for name in node.output)


def rename_values(graph: onnx.GraphProto, rename: Callable[[str], str], node_name: Callable[[str], str]) -> None:
    """Rename every value and node of a graph and its subgraphs, in place."""
    for body in graphs_within(graph):
        for value in (*body.input, *body.output, *body.value_info, *body.initializer):
            value.name = rename(value.name)
        for node in body.node:
            node.name = node_name(node.name)
            node.input[:] = [rename(name) for name in node.input]
            node.output[:] = [rename(name) for name in node.output]


def _graph_proto(model: ir.Model, opset: int) -> onnx.GraphProto:
    """Return the graph of a model at an opset in which all graphs of the program keep their meaning."""
    copy = model.clone()
    if set(copy.opset_imports) != {""} or not raise_opset(copy.graph, opset):
        raise UnsupportedOperatorError(
            f"the {model.graph.name} graph of the program cannot stand in one ONNX model with the others: it holds operators "
            "outside the standard, or ones that mean something else at the others' opset. "
            "Save the program as a folder, with program.save"
        )
    return model_proto(copy).graph


def _check_size(program: Program, state: Mapping[str, np.ndarray], inference: ir.Model) -> None:
    graphs = sum(constant_bytes(getattr(program, name)) for name in GRAPH_NAMES if name != "predict")
    graphs += sum(constant_bytes(graph) * 4 // 3 for graph in program.semantic.values())
    weights = sum(array.nbytes for name, array in state.items() if not name.startswith(("param/", "stat/")))
    total = graphs + weights + constant_bytes(inference)
    if total > LARGEST:
        raise CheckpointError(
            f"the program and its state take {total / 2**30:.1f} GiB, more than one ONNX model can hold: save the program as a "
            "folder, with program.save, and the state as a checkpoint"
        )


def _initialization(program: Program, graph: onnx.GraphProto, state: Mapping[str, np.ndarray]) -> onnx.GraphProto:
    """Return the init graph without inputs: the seed 0 and the parameters that it reads become constants."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for entry in program.signature["init"].inputs:
        if entry.role is Role.SEED:
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(0, entry.numpy_dtype), entry.name))
        elif entry.name in read:
            graph.initializer.append(_tensor(entry, entry.name, state[entry.name]))
    del graph.input[:]
    return graph


def _algorithm(program: Program, graph: onnx.GraphProto, state: Mapping[str, np.ndarray], naming: _Naming) -> onnx.GraphProto:
    rename_values(graph, naming.rename, lambda name: naming.prefix + name)
    graph.name = "step"
    signature = program.signature["step"]
    own = {naming.step[entry.name] for entry in signature.inputs if entry.role in (Role.LABEL, Role.HYPERPARAMETER)}
    kept = [value for value in graph.input if value.name in own]
    del graph.input[:]
    graph.input.extend(kept)
    for entry in signature.inputs_of(Role.HYPERPARAMETER):
        if entry.default is not None:
            graph.initializer.append(_tensor(entry, naming.step[entry.name], np.asarray(entry.default)))
    for entry in program.signature.state:
        name = naming.state[entry.name]
        if entry.role not in (Role.PARAMETER, Role.STATISTIC) or name != entry.name.partition("/")[2]:
            graph.initializer.append(_tensor(entry, name, state[entry.name]))
    return graph


def _tensor(entry: Entry, name: str, array: np.ndarray) -> onnx.TensorProto:
    return ir.to_proto(ir.Tensor(np.asarray(array, entry.numpy_dtype, order="C"), entry.dtype, name=name))


def _bind(
    bindings: Iterable[onnx.StringStringEntryProto],
    signature: GraphSignature,
    initializers: Mapping[str, str],
    value: Callable[[Entry], str],
) -> None:
    for entry in signature.outputs:
        if entry.updates is not None:
            bindings.add(key=initializers[entry.updates], value=value(entry))  # type: ignore[attr-defined]


def _function(name: str, graph: onnx.GraphProto, opset: int) -> onnx.FunctionProto:
    constants = [
        onnx.helper.make_node("Constant", [], [tensor.name], name=INITIALIZER_NODE + tensor.name, value=tensor)
        for tensor in graph.initializer
    ]
    function = onnx.helper.make_function(
        FUNCTION_DOMAIN,
        name,
        [value.name for value in graph.input],
        [value.name for value in graph.output],
        [*constants, *graph.node],
        [onnx.helper.make_opsetid("", opset)],
    )
    function.value_info.extend(graph.value_info)
    return function


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
        ModelError: the file is missing, corrupt or not an ONNX model, or its external data is missing, too short or elsewhere.
        CheckpointError: the model has no training graphs, or lacks something that a program needs.
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
        program = Program(LoweredGraphs.read(models, self.signature, options, semantic), weights)
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
        except Exception as error:  # the errors of the protobuf library differ from those of onnx_ir
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
        except Exception as error:  # the checker's errors have no common base class with those of onnx_ir
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
