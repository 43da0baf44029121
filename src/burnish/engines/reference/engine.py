"""Run programs and models on ``onnx.reference.ReferenceEvaluator``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from burnish.engines.array_runner import ArrayRunner
from burnish.engines.base import Arrays, LoadedModel, RunsModels, refuse_workers
from burnish.engines.communicator import Communicator
from burnish.engines.reference.operators import OPERATORS
from burnish.errors import BurnishError, EngineError
from burnish.graph import SIXTEEN_BIT, describe_lookup, model_proto
from burnish.graph.protos import graphs_within, read_apart
from burnish.rewriting.lower_semantic_operators import expand_recurrent_layers
from burnish.stopping import PythonStop, stoppable
from burnish.targets import TARGETS

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs

ABSENT = "burnish:absent"
"""The prefix of names for absent outputs; no builder or exporter uses it."""


class ReferenceEngine(RunsModels):
    """The engine that runs programs on ``onnx.reference.ReferenceEvaluator``; one thread, on the CPU."""

    name = "reference"
    target = TARGETS["reference"]

    def open(
        self,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        *,
        device: str | None = None,
        threads: int | None = None,
        communicator: Communicator | None = None,
    ) -> ArrayRunner:
        """Open a program; ``threads`` has no effect.

        Raises:
            EngineError: ``device`` is not ``cpu``, or there is a communicator.
        """
        refuse_workers(self.name, communicator)
        if device not in (None, "cpu"):
            raise EngineError(f"The reference engine runs on device 'cpu' only, not on '{device}': leave device out")
        return ArrayRunner(graphs, state, lambda graph: _loaded(graphs[graph], graph), _loaded)

    def load(self, model: ir.Model, threads: int | None = None) -> LoadedModel:
        """Load a model, to be run repeatedly; ``threads`` has no effect.

        Raises:
            EngineError: the evaluator lacks an operator, or, from the returned callable, fails in one.
        """
        return _loaded(model, "model")


def _loaded(model: ir.Model, graph: str) -> LoadedModel:
    return partial(_evaluate, _load(model, graph), graph)


def _load(model: ir.Model, graph: str) -> ReferenceEvaluator:
    try:
        proto = model_proto(expand_recurrent_layers(model))
        _name_absent_outputs(proto)
        evaluator = ReferenceEvaluator(proto, new_ops=OPERATORS)
    except BurnishError:  # a constant that is no longer readable
        raise
    except Exception as error:  # the evaluator raises any error of an operator's Python code
        raise EngineError(
            f"The reference engine cannot load the {graph} graph: {_reason(error)}. Use engine='onnxruntime'"
        ) from error
    if not _has_sixteen_bits(model):
        _compute_with_all_digits(evaluator)
    return evaluator


def _has_sixteen_bits(model: ir.Model) -> bool:
    """True if a value has sixteen bits: float32 attributes then make operators sum in float32."""
    inputs = [*model.graph.inputs, *model.graph.initializers.values()]
    outputs = (output for node in model.graph.all_nodes() for output in node.outputs)
    return any(value.dtype in SIXTEEN_BIT for value in (*inputs, *outputs))


def _compute_with_all_digits(evaluator: ReferenceEvaluator) -> None:
    """Turn attributes into Python numbers, in place: the evaluator's are float32, and so are results computed only from them.

    Their values are still those of float32, as in the file.
    """
    for node in evaluator.rt_nodes_:
        for name, value in list(vars(node).items()):
            if isinstance(value, np.float32):
                setattr(node, name, float(value))
            elif isinstance(value, list) and value and all(isinstance(item, np.float32) for item in value):
                setattr(node, name, [float(item) for item in value])
            elif isinstance(value, ReferenceEvaluator):
                _compute_with_all_digits(value)


def _name_absent_outputs(model: onnx.ModelProto) -> None:
    for body in graphs_within(model.graph, *model.functions):
        for number, node in enumerate(body.node):
            for position, name in enumerate(node.output):
                if not name:
                    node.output[position] = f"{ABSENT}/{number}/{position}"


def _evaluate(evaluator: ReferenceEvaluator, graph: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
    try:
        with np.errstate(all="ignore"):
            results = stoppable(PythonStop(), graph, evaluator.run, None, dict(inputs))
    except Exception as error:  # the evaluator raises any error of an operator's Python code
        place = _place_of(error)
        where = "" if place is None else f" at {place}"
        raise EngineError(
            f"The reference engine failed in the {graph} graph{where}: {type(error).__name__}: {_reason(error)}. No state has "
            "changed. Check the shapes and values that the batch leads to there, or use engine='onnxruntime'"
        ) from error
    return {name: np.asarray(result) for name, result in zip(evaluator.output_names, results, strict=True)}


def _place_of(error: BaseException) -> str | None:
    """Return the node, also in a body, that the evaluator was running when it raised an error; None if it ran none."""
    place = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        operator = frame.f_locals.get("node")
        if frame.f_code is ReferenceEvaluator.run.__code__ and isinstance(operator, OpRun):
            with read_apart():
                place = describe_lookup(ir.serde.deserialize_node(operator.onnx_node))
        traceback = traceback.tb_next
    return place


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
