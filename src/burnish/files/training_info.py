"""A program as one ``ModelProto``: the inference graph, and a ``TrainingInfoProto`` with what a step changes.

==================  ========================================================================================================
``graph``           predict, with the weights and statistics as initializers under the source's names: what plain runtimes run
``initialization``  init, with the seed as a constant
``algorithm``       step, appended to ``graph`` as the standard says: it reads its inputs and initializers by name, and keeps what
                    belongs to no inference (optimizer state, key, step) as initializers of its own
``functions``       grad, apply and evaluate, which no node calls: they are there for burnish and for people
``metadata_props``  a digest of the whole; the signature and the options, as JSON; next to them what an exported model says
==================  ========================================================================================================
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import CheckpointError, UnsupportedOperatorError
from burnish.files.digest import BLANK, DIGEST, FORMAT_VERSION, digest_text
from burnish.files.export import export_inference
from burnish.files.file_writing import file_path, replacing
from burnish.files.identity import adapter_base, graph_hashes, program_hash
from burnish.files.metadata import TRAINING
from burnish.files.model_file import constant_bytes, require_valid
from burnish.graph import model_proto
from burnish.graph.protos import graphs_within
from burnish.graph.versions import raise_opset
from burnish.importer.lightweight import without_payloads
from burnish.program import Program
from burnish.program.signature import GRAPH_NAMES, Entry, GraphSignature, Role
from burnish.program.state import check_state

FORMAT = "burnish training"
FUNCTION_DOMAIN = "burnish.program"
FUNCTIONS = ("grad", "apply", "evaluate")
PREFIX = "training/"
INITIALIZER_NODE = "initializer:"
"""A function has no initializers: nodes of this name hold them."""

LARGEST = 2**31 - 2**20
"""Bytes of tensors that still leave room for the graphs; a protobuf ends at 2 GiB."""


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
    """A graph with operators outside the standard, which plain runtimes need not understand, as text."""
    return base64.b64encode(model_proto(graph).SerializeToString(deterministic=True)).decode()


def write_training_model(model: onnx.ModelProto, path: str | os.PathLike[str]) -> Path:
    """Write a model, whole or not at all; an earlier one is replaced in one step. Folders on the way are created.

    Raises:
        CheckpointError: the file cannot be written, or is one that this function did not write; it is as it was.
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
    except Exception:  # the protobuf library's errors are no class of their own, and no ONNX model is no such model either
        return False
    return any(entry.key == TRAINING for entry in properties)


class _Naming:
    """What the step's values and the program's state are called in the file.

    Attributes:
        prefix: of every value that only the step computes; no name of the inference graph starts with it.
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
        """The name in the file of any value of the step graph."""
        return self.step.get(name, self.prefix + name if name else "")


def names_of(graph: onnx.GraphProto) -> Iterator[str]:
    """Every name that a graph gives to a value, in its subgraphs too."""
    for body in graphs_within(graph):
        yield from (value.name for value in (*body.input, *body.initializer))
        yield from (name for node in body.node for name in node.output)


def rename_values(graph: onnx.GraphProto, rename: Callable[[str], str], node_name: Callable[[str], str]) -> None:
    """Rename, in place, every value and node of a graph and its subgraphs."""
    for body in graphs_within(graph):
        for value in (*body.input, *body.output, *body.value_info, *body.initializer):
            value.name = rename(value.name)
        for node in body.node:
            node.name = node_name(node.name)
            node.input[:] = [rename(name) for name in node.input]
            node.output[:] = [rename(name) for name in node.output]


def _graph_proto(model: ir.Model, opset: int) -> onnx.GraphProto:
    """The graph of a model, at an opset in which all graphs of the program mean the same."""
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
    """The init graph without inputs: the seed 0, and the parameters that it reads, are constants."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for entry in program.signature["init"].inputs:
        if entry.role is Role.SEED:
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(0, entry.numpy_dtype), entry.name))
        elif entry.name in read:
            graph.initializer.append(_tensor(entry, entry.name, state[entry.name]))
    del graph.input[:]
    return graph


def _algorithm(program: Program, graph: onnx.GraphProto, state: Mapping[str, np.ndarray], naming: _Naming) -> onnx.GraphProto:
    """The step graph as what is appended to the inference graph."""
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
