"""The reference engine: ``onnx.reference``, the standard's own evaluator in numpy. Slow; an oracle for tests.

It computes in the dtypes of the graph, so a program compiled in float64 gives float64 results. Known to be wrong in it, and
not to be used as an oracle for: BatchNormalization in training mode before version 14, and LayerNormalization's
``stash_type``. Corrected here are MaxPool, whose indices are wrong in it where every stride is 1, ConvTranspose, which
adds up values of sixteen bits in sixteen bits, and LogSoftmax, which is -inf in it where a probability underflows. Recurrent
layers run as what they become in training: the evaluator takes no notice of lengths of sequences, and has no GRU in two
directions. Outputs that a node leaves out are named for it: it keeps them under the empty name, and gives them to every later
node that leaves an input out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_conv_transpose import ConvTranspose as EvaluatorConvTranspose
from onnx.reference.ops.op_log_softmax import LogSoftmax as EvaluatorLogSoftmax
from onnx.reference.ops.op_max_pool import MaxPool as EvaluatorMaxPool

from burnish.engines.base import NOTHING, Arrays, LoadedModel, check_finite_loss
from burnish.errors import EngineError
from burnish.graph import describe_place
from burnish.passes import expand_recurrent_layers

if TYPE_CHECKING:
    from burnish.program import Program

ABSENT = "burnish:absent"
"""Begins the names of outputs that nodes leave out; no name that a builder or an exporter gives begins so."""


class LogSoftmax(EvaluatorLogSoftmax):
    """The operator without the logarithm of a probability, which may be too small for its dtype."""

    op_domain = ""

    def _run(self, x: np.ndarray, axis: int | None = None) -> Any:
        if x.size == 0:
            return (x,)
        along = self.axis if axis is None else axis  # type: ignore[attr-defined]  # the evaluator sets attributes
        below = x - x.max(axis=along, keepdims=True)
        return ((below - np.log(np.exp(below).sum(axis=along, keepdims=True))).astype(x.dtype),)


class MaxPool(EvaluatorMaxPool):
    """The evaluator's operator, always by the one of its two algorithms that gives right indices."""

    op_domain = ""

    def _run(self, x: np.ndarray, **attributes: Any) -> Any:  # type: ignore[override]  # the evaluator passes them by name
        return self._max_pool(x, **attributes)  # type: ignore[no-untyped-call]


class ConvTranspose(EvaluatorConvTranspose):
    """The evaluator's operator with sums of sixteen-bit values in float32, rounded once, as it computes Conv."""

    op_domain = ""

    def _run(self, x: np.ndarray, *operands: np.ndarray | None, **attributes: Any) -> Any:  # type: ignore[override]
        if x.dtype.itemsize != 2:
            return super()._run(x, *operands, **attributes)  # type: ignore[no-untyped-call]
        wide = [None if operand is None else operand.astype(np.float32) for operand in (x, *operands)]
        (y,) = super()._run(*wide, **attributes)  # type: ignore[no-untyped-call]
        return (y.astype(x.dtype),)


class ReferenceEngine:
    """Runs programs on ``onnx.reference.ReferenceEvaluator``; one thread, on the CPU."""

    name = "reference"

    def open(
        self, program: Program, state: Mapping[str, np.ndarray], *, device: str | None = None, threads: int | None = None
    ) -> ReferenceRunner:
        """Open a program; ``threads`` has no effect.

        Raises:
            EngineError: ``device`` is not ``cpu``.
        """
        if device not in (None, "cpu"):
            raise EngineError(f"The reference engine runs on device 'cpu' only, not on '{device}': leave device out")
        return ReferenceRunner(program, state)

    def load(self, model: ir.Model) -> LoadedModel:
        """Load a model, to be run any number of times.

        Raises:
            EngineError: the evaluator lacks an operator, or, from what is returned, fails in one.
        """
        evaluator = _load(model, "model")
        return lambda inputs: _evaluate(evaluator, inputs, "model")

    def run(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run a model once; returns its outputs by name.

        Raises:
            EngineError: the evaluator lacks an operator, or fails in one.
        """
        return self.load(model)(inputs)


class ReferenceRunner:
    """A program opened on the reference engine."""

    def __init__(self, program: Program, state: Mapping[str, np.ndarray]):
        self._program = program
        self._state = {name: np.array(array) for name, array in state.items()}
        self._evaluators: dict[str, ReferenceEvaluator] = {}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._run("step", inputs)
        signature = self._program.signature["step"]
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
            evaluator = self._evaluators[graph] = _load(self._program.graphs[graph], graph)
        names = [entry.name for entry in self._program.signature[graph].inputs if entry.is_state]
        held = {name: self._state[instead.get(name, name)] for name in names}
        return _evaluate(evaluator, {**held, **inputs}, graph)


def _load(model: ir.Model, graph: str) -> ReferenceEvaluator:
    try:
        proto = ir.to_proto(expand_recurrent_layers(model))
        _name_absent_outputs(proto.graph)
        for function in proto.functions:
            _name_absent_outputs(function)
        return ReferenceEvaluator(proto, new_ops=[ConvTranspose, LogSoftmax, MaxPool])
    except Exception as error:  # the evaluator raises whatever an operator's Python code raises
        raise EngineError(
            f"The reference engine cannot load the {graph} graph: {_reason(error)}. Use engine='onnxruntime'"
        ) from error


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
