"""Programs and models on ``onnx.reference.ReferenceEvaluator``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from burnish.engines.base import NOTHING, Arrays, LoadedModel, RunsModels, check_finite_loss, refuse_workers
from burnish.engines.communicator import Communicator
from burnish.engines.reference.operators import OPERATORS
from burnish.errors import BurnishError, EngineError
from burnish.graph import SIXTEEN_BIT, describe_place, model_proto
from burnish.lowering import TARGETS
from burnish.passes import expand_recurrent_layers

if TYPE_CHECKING:
    from burnish.program.executable import Executable

ABSENT = "burnish:absent"
"""Begins the names of outputs that nodes leave out; no name that a builder or an exporter gives begins so."""


class ReferenceEngine(RunsModels):
    """Runs programs on ``onnx.reference.ReferenceEvaluator``; one thread, on the CPU."""

    name = "reference"
    target = TARGETS["reference"]

    def open(
        self,
        executable: Executable,
        state: Mapping[str, np.ndarray],
        *,
        device: str | None = None,
        threads: int | None = None,
        communicator: Communicator | None = None,
    ) -> ReferenceRunner:
        """Open a program; ``threads`` has no effect.

        Raises:
            EngineError: ``device`` is not ``cpu``, or there is a communicator.
        """
        refuse_workers(self.name, communicator)
        if device not in (None, "cpu"):
            raise EngineError(f"The reference engine runs on device 'cpu' only, not on '{device}': leave device out")
        return ReferenceRunner(executable, state)

    def load(self, model: ir.Model) -> LoadedModel:
        """Load a model, to be run any number of times.

        Raises:
            EngineError: the evaluator lacks an operator, or, from what is returned, fails in one.
        """
        evaluator = _load(model, "model")
        return lambda inputs: _evaluate(evaluator, inputs, "model")


class ReferenceRunner:
    """A program opened on the reference engine."""

    def __init__(self, executable: Executable, state: Mapping[str, np.ndarray]):
        self._executable = executable
        self._state = {name: np.array(array) for name, array in state.items()}
        self._evaluators: dict[str, ReferenceEvaluator] = {}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._run("step", inputs)
        signature = self._executable.signature["step"]
        check_finite_loss(signature, outputs, lambda: self._state)
        for name, output in signature.updates.items():
            self._state[name] = np.array(outputs.pop(output))
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("evaluate", inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("predict", inputs, instead)

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._state.items()}

    def state_entry(self, name: str) -> np.ndarray:
        return self._state[name].copy()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._state = {name: np.array(state[name]) for name in self._state}

    def _run(self, graph: str, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        evaluator = self._evaluators.get(graph)
        if evaluator is None:
            evaluator = self._evaluators[graph] = _load(self._executable.graph(graph), graph)
        names = [entry.name for entry in self._executable.signature[graph].inputs if entry.is_state]
        held = {name: self._state[instead.get(name, name)] for name in names}
        return _evaluate(evaluator, {**held, **inputs}, graph)


def _load(model: ir.Model, graph: str) -> ReferenceEvaluator:
    try:
        proto = model_proto(expand_recurrent_layers(model))
        _name_absent_outputs(proto.graph)
        for function in proto.functions:
            _name_absent_outputs(function)
        evaluator = ReferenceEvaluator(proto, new_ops=OPERATORS)
    except BurnishError:  # a constant that cannot be read any more
        raise
    except Exception as error:  # the evaluator raises whatever an operator's Python code raises
        raise EngineError(
            f"The reference engine cannot load the {graph} graph: {_reason(error)}. Use engine='onnxruntime'"
        ) from error
    if not _has_sixteen_bits(model):
        _compute_with_all_digits(evaluator)
    return evaluator


def _has_sixteen_bits(model: ir.Model) -> bool:
    """Whether a value has sixteen bits: beside those, attributes in float32 let operators sum in float32."""
    inputs = [*model.graph.inputs, *model.graph.initializers.values()]
    outputs = (output for node in model.graph.all_nodes() for output in node.outputs)
    return any(value.dtype in SIXTEEN_BIT for value in (*inputs, *outputs))


def _compute_with_all_digits(evaluator: ReferenceEvaluator) -> None:
    """Let, in place, attributes be Python's numbers: the evaluator's are of float32, and so is what it computes from them alone.

    Their values are those of float32 still, which is how a file holds them.
    """
    for node in evaluator.rt_nodes_:
        for name, value in list(vars(node).items()):
            if isinstance(value, np.float32):
                setattr(node, name, float(value))
            elif isinstance(value, list) and value and all(isinstance(item, np.float32) for item in value):
                setattr(node, name, [float(item) for item in value])
            elif isinstance(value, ReferenceEvaluator):
                _compute_with_all_digits(value)


def _name_absent_outputs(graph: onnx.GraphProto | onnx.FunctionProto) -> None:
    for number, node in enumerate(graph.node):
        for position, name in enumerate(node.output):
            if not name:
                node.output[position] = f"{ABSENT}/{number}/{position}"
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                _name_absent_outputs(body)


def _evaluate(evaluator: ReferenceEvaluator, inputs: Mapping[str, np.ndarray], graph: str) -> Arrays:
    try:
        with np.errstate(all="ignore"):
            results = evaluator.run(None, dict(inputs))
    except Exception as error:  # the evaluator raises whatever an operator's Python code raises
        place = _place_of(error)
        where = "" if place is None else f" at {place}"
        raise EngineError(
            f"The reference engine failed in the {graph} graph{where}: {type(error).__name__}: {_reason(error)}. No state has "
            "changed. Check the shapes and values that the batch leads to there, or use engine='onnxruntime'"
        ) from error
    return {name: np.asarray(result) for name, result in zip(evaluator.output_names, results, strict=True)}


def _place_of(error: BaseException) -> str | None:
    """Return the node, of a body where one runs, that the evaluator was at when it raised an error; None where it was at none."""
    place = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        operator = frame.f_locals.get("node")
        if frame.f_code is ReferenceEvaluator.run.__code__ and isinstance(operator, OpRun):
            place = describe_place(ir.serde.deserialize_node(operator.onnx_node))
        traceback = traceback.tb_next
    return place


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
