"""Builds the gradient graph of a sample and runs it on stock ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from burnish.autodiff import differentiate
from burnish.graph import BURNISH_DOMAIN, FLOATING, Builder, Tensor
from burnish.modes import bind_as_exported, put_training_forms
from burnish.operators.recurrent_layer import lacks_kernel
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.targets import TARGETS, check_allowed
from oracles.central_differences import central_differences
from oracles.rewritten import rewritten
from specs.operator_spec import OperatorSpec, Sample

NEWEST_OPSET = min(TARGETS["onnxruntime"].newest_opset, onnx.defs.onnx_opset_version())


@dataclass(frozen=True)
class GradientGraph:
    """A lowered model with the sample's outputs followed by the gradients, and the counts a test may want.

    Attributes:
        model: the model, standard operators only.
        outputs: names of the sample's outputs.
        gradients: for each differentiated input the name of its gradient, None where it has none.
        emitted: the nodes of the reverse pass before lowering, without constants, as operator names.
        dead: those of them that nothing reads.
    """

    model: ir.Model
    outputs: list[str]
    gradients: list[str | None]
    emitted: list[str]
    dead: list[str]

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The model as a file holds it: written once, as it takes as long as a run."""
        return ir.to_proto(self.model)


class Erf(OpRun):
    """Erf in the precision of its input; the reference's own returns float32 values."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Evaluator:
    """Runs a model: on ONNX Runtime's CPU kernels, or on the standard's reference where they lack the dtype."""

    def __init__(self, model: ir.Model | onnx.ModelProto):
        self.proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self.session: Any
        try:
            self.session = onnxruntime.InferenceSession(
                self.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
            self.session = ReferenceEvaluator(self.proto, new_ops=[Erf])
        self.inputs = [value.name for value in self.proto.graph.input]

    @property
    def on_onnxruntime(self) -> bool:
        return not isinstance(self.session, ReferenceEvaluator)

    def __call__(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return every output by name."""
        with np.errstate(all="ignore"):
            results = self.session.run(None, {name: feeds[name] for name in self.inputs})
        return {value.name: np.asarray(result) for value, result in zip(self.proto.graph.output, results, strict=True)}


def cast_inputs(sample: Sample, dtype: str) -> list[np.ndarray | None]:
    """The sample's inputs with the floating-point ones in ``dtype``."""
    return [
        None if array is None else np.asarray(array, dtype=dtype if np.asarray(array).dtype.kind == "f" else None)
        for array in sample.inputs
    ]


def differentiated(sample: Sample) -> list[int]:
    """Indices of the inputs to differentiate by."""
    if sample.wrt is not None:
        return list(sample.wrt)
    return [index for index, array in enumerate(sample.inputs) if array is not None and np.asarray(array).dtype.kind == "f"]


def feeds_of(sample: Sample, inputs: Sequence[np.ndarray | None], cotangents: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
    """What a graph built by this harness is fed."""
    feeds = {f"input{index}": array for index, array in enumerate(inputs) if array is not None}
    return feeds | {f"cotangent{index}": array for index, array in cotangents.items()}


def as_stored(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with the values that a model file holds: floats are float32."""
    return {name: float(np.float32(value)) if isinstance(value, float) else value for name, value in attributes.items()}


def forward_graph(
    spec: OperatorSpec, sample: Sample, dtype: str, shapes: str = "static"
) -> tuple[ir.Graph, list[ir.Value | None], list[ir.Value]]:
    """Return a graph with the sample's node (or small graph), its input values and its outputs; no output is declared."""
    graph = ir.Graph([], [], nodes=[], name="sample", opset_imports={"": sample.opset, BURNISH_DOMAIN: 1})
    builder = Builder(graph)
    values: list[ir.Value | None] = []
    for index, array in enumerate(cast_inputs(sample, dtype)):
        if array is None:
            values.append(None)
            continue
        constant = array.dtype.kind != "f" if sample.constants is None else index in sample.constants
        value = ir.Value(name=f"input{index}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        if constant:
            value.shape = ir.Shape(array.shape)
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
        else:
            value.shape = _known_shape(array.shape, index, shapes, index in sample.batched)
            graph.inputs.append(value)
        values.append(value)
    tensors = [None if value is None else builder.tensor(value) for value in values]
    if sample.build is not None:
        result: Any = sample.build(builder, tensors)
    else:
        result = builder.op(spec.op_type, *tensors, outputs=sample.outputs, **as_stored(sample.attributes))
    outputs = [tensor.value for tensor in (result if isinstance(result, tuple) else (result,))]
    return graph, values, outputs


def gradient_graph(
    spec: OperatorSpec,
    sample: Sample,
    dtype: str,
    shapes: str = "static",
    wrt: Sequence[int] | None = None,
    cotangents: Sequence[int] | None = None,
) -> GradientGraph:
    """Build, differentiate and lower a sample.

    Args:
        wrt: the inputs to differentiate by, instead of the sample's.
        cotangents: the outputs that carry a cotangent, instead of the sample's.
    """
    graph, values, outputs = forward_graph(spec, sample, dtype, shapes)
    outputs = _in_training_form(graph, outputs)
    forward = set(graph)
    flowing = carrying_outputs(sample, outputs) if cotangents is None else list(cotangents)
    builder = Builder(graph)
    incoming: dict[ir.Value, Tensor] = {}
    for index in flowing:
        shape = None if outputs[index].shape is None else ir.Shape(outputs[index].shape.dims)
        cotangent = ir.Value(name=f"cotangent{index}", type=outputs[index].type, shape=shape)
        graph.inputs.append(cotangent)
        incoming[outputs[index]] = builder.tensor(cotangent)
    wanted = [values[index] for index in (differentiated(sample) if wrt is None else wrt)]
    assert all(value is not None for value in wanted)
    gradients = differentiate(builder, incoming, wanted)
    names = []
    graph.outputs.extend(_declared(builder, output) for output in outputs)
    for value in wanted:
        gradient = gradients[value]
        if gradient is None:
            names.append(None)
            continue
        assert gradient.dtype == value.dtype, f"gradient of '{value.name}' is {gradient.dtype}, the value {value.dtype}"
        output = _declared(builder, gradient.value, copy=True)
        graph.outputs.append(output)
        names.append(output.name)
    emitted = [node for node in graph if node not in forward and node.op_type not in ("Constant", "Identity")]
    dead = [
        str(node.op_type) for node in emitted if not any(output.uses() or output.is_graph_output() for output in node.outputs)
    ]
    model = ir.Model(graph, ir_version=10)
    emitted_names = [str(node.op_type) for node in emitted]
    output_names = [str(output.name) for output in outputs]
    lower_semantic_operators(model)
    return GradientGraph(model, output_names, names, emitted_names, dead)


def _in_training_form(graph: ir.Graph, outputs: list[ir.Value]) -> list[ir.Value]:
    """Bind the graph as ``burnish.grad`` does; return the values that stand for its outputs now."""
    graph.outputs.extend(outputs)
    bind_as_exported(graph)
    bound = list(graph.outputs)
    graph.outputs.clear()
    return bound


def forward_evaluator(spec: OperatorSpec, sample: Sample, dtype: str) -> tuple[Evaluator, list[str]]:
    """The sample alone, ready to run, and the names of its outputs; a layer without a kernel as in an inference graph."""
    graph, _, outputs = forward_graph(spec, sample, dtype)
    graph.outputs.extend(outputs)
    put_training_forms(graph, lacks_kernel)
    names = [str(output.name) for output in graph.outputs]
    model = rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10))
    graph.opset_imports.pop(BURNISH_DOMAIN, None)
    return Evaluator(model), names


def carrying_outputs(sample: Sample, outputs: Sequence[ir.Value]) -> list[int]:
    """Indices of the outputs that carry a cotangent."""
    if sample.cotangents is not None:
        return list(sample.cotangents)
    return [index for index, output in enumerate(outputs) if output.dtype in FLOATING]


def random_cotangents(
    spec: OperatorSpec, sample: Sample, rng: np.random.Generator, dtype: str = "float64"
) -> dict[int, np.ndarray]:
    """Random signed cotangents, in float64 with values that float16 holds, of the outputs that carry one.

    ``dtype`` is what the sample runs in to find the outputs' shapes.
    """
    evaluate, names = forward_evaluator(spec, sample, dtype)
    results = evaluate(feeds_of(sample, cast_inputs(sample, dtype), {}))
    arrays = [results[name] for name in names]
    carrying = range(len(arrays)) if sample.cotangents is None else sample.cotangents
    return {
        index: rng.standard_normal(arrays[index].shape).astype(np.float16).astype(np.float64)
        for index in carrying
        if arrays[index].dtype.kind == "f"
    }


def numerical_gradients(
    spec: OperatorSpec, sample: Sample, cotangents: dict[int, np.ndarray], wrt: Sequence[int]
) -> list[np.ndarray]:
    """Gradients of sum(cotangent * output) by central differences in float64."""
    total, inputs = weighted_output(spec, sample, cotangents, wrt), cast_inputs(sample, "float64")
    return [central_differences(total, inputs, index) for index in wrt]


def weighted_output(
    spec: OperatorSpec, sample: Sample, cotangents: dict[int, np.ndarray], wrt: Sequence[int]
) -> Callable[[list[np.ndarray | None]], float]:
    """The sum of cotangent * output, in float64, as a function of the inputs, of which those in ``wrt`` may move."""
    evaluate, names = forward_evaluator(spec, sample, "float64")
    constants = [index for index in wrt if f"input{index}" not in evaluate.inputs]
    if constants:
        movable = [index for index in sample.constants or () if index not in constants]
        return weighted_output(spec, replace(sample, constants=movable), cotangents, wrt)

    def total(inputs: list[np.ndarray | None]) -> float:
        results = evaluate(feeds_of(sample, inputs, {}))
        return float(sum((results[names[index]] * cotangent).sum() for index, cotangent in cotangents.items()))

    return total


def run_gradients(
    graph: GradientGraph, sample: Sample, dtype: str, cotangents: dict[int, np.ndarray], wrt: Sequence[int] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a gradient graph; return the sample's outputs and the gradients, zeros for one that does not exist."""
    inputs = cast_inputs(sample, dtype)
    expected = {value.name: value.dtype.numpy() for value in graph.model.graph.inputs if value.dtype is not None}
    flowing = {index: array.astype(expected[f"cotangent{index}"]) for index, array in cotangents.items()}
    results = Evaluator(graph.proto)(feeds_of(sample, inputs, flowing))
    gradients = []
    for index, name in zip(differentiated(sample) if wrt is None else wrt, graph.gradients, strict=True):
        operand = inputs[index]
        assert operand is not None
        gradient = np.zeros_like(operand) if name is None else results[name]
        assert gradient.shape == operand.shape, f"gradient of input {index} has shape {gradient.shape}, the input {operand.shape}"
        assert gradient.dtype == operand.dtype, f"gradient of input {index} is {gradient.dtype}, the input {operand.dtype}"
        gradients.append(gradient)
    return [results[name] for name in graph.outputs], gradients


def check_standard(graph: GradientGraph) -> None:
    """Assert that the model is valid ONNX with consistent shapes, in standard operators only.

    The checker refuses a graph input without a shape, so it is not asked about those.
    """
    assert {node.domain for node in graph.model.graph.all_nodes()} <= {""}
    check_allowed(graph.model, TARGETS["onnxruntime"])
    if all(value.shape is not None for value in graph.model.graph.inputs):
        onnx.checker.check_model(graph.proto, full_check=True)


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Assert that ``actual`` is finite and within ``tolerance`` of ``expected``, relative to its norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: not finite\n{actual}"
    error = float(np.linalg.norm(actual - expected))
    scale = float(np.linalg.norm(expected))
    assert error <= tolerance * scale + tolerance * 1e-3, (
        f"{what}: relative error {error / max(scale, 1e-300):.2e} > {tolerance:.0e}\n{actual}\nexpected\n{expected}"
    )


def _known_shape(extents: tuple[int, ...], index: int, shapes: str, batched: bool) -> ir.Shape | None:
    if shapes == "unranked":
        return None
    if shapes == "symbolic":
        return ir.Shape([f"input{index}_axis{axis}" for axis in range(len(extents))])
    if shapes == "batch" and batched and extents:
        return ir.Shape(["batch", *extents[1:]])
    return ir.Shape(extents)


def _declared(builder: Builder, value: ir.Value, copy: bool = False) -> ir.Value:
    """A value that may be declared as a graph output: inputs and repeated values go through an Identity."""
    if value.is_graph_input() or value.is_initializer() or (copy and value.is_graph_output()):
        return builder.op("Identity", builder.tensor(value)).value
    return value
