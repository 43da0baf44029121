"""What a model in float32 computes, as a function in float64: for differences that know nothing of what is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from oracles.gradient_harness import Erf
from oracles.onnxruntime_outputs import onnxruntime_outputs

Arrays = dict[str, np.ndarray]
Function = Callable[[Mapping[str, np.ndarray]], Arrays]

ALWAYS_FLOAT = {"Resize": (1, 2), "Upsample": (1,), "Dropout": (1,)}
"""Operands that are float32 whatever the dtype of the data."""


class BatchNormalization(OpRun):
    """In inference mode; what the evaluator has for opsets before 14 is in training mode, or fails."""

    def _run(self, x: np.ndarray, *operands: np.ndarray, **attributes: float) -> tuple[np.ndarray]:
        scale, bias, mean, variance = (operand.reshape(-1, *[1] * (x.ndim - 2)) for operand in operands)
        return ((x - mean) / np.sqrt(variance + attributes["epsilon"]) * scale + bias,)


def as_float64(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays with those of float32 in float64."""
    return {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in arrays.items()}


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float64: inputs, outputs, weights and constants; scales of images stay in float32."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    graphs = list(_graphs(copy.graph))
    narrow = {
        node.input[index]
        for graph in graphs
        for node in graph.node
        for index in ALWAYS_FLOAT.get(node.op_type, ())
        if index < len(node.input)
    }
    for graph in graphs:
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT and info.name not in narrow:
                info.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in graph.initializer:
            if tensor.name not in narrow:
                _widen(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR and node.output[0] not in narrow:
                    _widen(attribute.t)
                if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE
    return copy


def float64_function(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], first: Sequence[Function] = ()) -> Function | None:
    """Return a function that computes the model's outputs in float64, or None where nothing here can.

    It agrees with what ONNX Runtime computes for the model in float32, in the very opset of the model, at ``feeds``: the
    standard's evaluator takes no notice of the opset in some operators.

    Args:
        model: in float32.
        feeds: a value for each input.
        first: functions to prefer, such as the same mathematics in PyTorch.
    """
    expected = onnxruntime_outputs(model, feeds)
    for function in (*first, *_evaluators(widened(model))):
        try:
            found = function(as_float64(feeds))
        except Exception:  # the evaluator raises whatever an operator's Python code raises
            continue
        if all(_agree(array, expected[name]) for name, array in found.items() if name in expected and array.dtype.kind == "f"):
            return function
    return None


def directional_difference(
    function: Function, feeds: Mapping[str, np.ndarray], name: str, direction: np.ndarray, cotangents: Mapping[str, np.ndarray]
) -> float:
    """The derivative of sum(cotangent * output) along a direction of one input, by central differences in float64."""
    point = as_float64(feeds)
    step = 1e-5 * max(1.0, float(np.abs(point[name]).max(initial=0)))

    def total(sign: int) -> float:
        outputs = function({**point, name: point[name] + sign * step * direction})
        return float(sum((outputs[output] * cotangent).sum() for output, cotangent in cotangents.items()))

    return (total(1) - total(-1)) / (2 * step)


def float32_difference(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    name: str,
    direction: np.ndarray,
    cotangents: Mapping[str, np.ndarray],
) -> float:
    """The same of ONNX Runtime's float32 values, for what nothing computes in float64: with a wide step, extrapolated to none.

    Of two central differences with the steps h and 2h, 4/3 and -1/3 cancel the term in h² (Richardson); about four digits hold.
    """
    step = 0.01

    def total(distance: float) -> float:
        moved = (feeds[name] + distance * direction).astype(np.float32)
        outputs = onnxruntime_outputs(model, {**feeds, name: moved})
        return float(sum((outputs[output].astype(np.float64) * cotangent).sum() for output, cotangent in cotangents.items()))

    near, far = ((total(distance) - total(-distance)) / (2 * distance) for distance in (step, 2 * step))
    return (4 * near - far) / 3


def _evaluators(model: onnx.ModelProto) -> Iterator[Function]:
    names = [output.name for output in model.graph.output]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # no kernel for float64; its errors share no base class
        pass
    else:
        yield lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))
    try:
        evaluator = ReferenceEvaluator(model, new_ops=[BatchNormalization, Erf])
    except RuntimeError:  # it lacks an operator
        return
    yield lambda feeds: dict(zip(names, map(np.asarray, evaluator.run(names, dict(feeds))), strict=True))


def _agree(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.shape == expected.shape and np.allclose(found, expected, rtol=1e-4, atol=1e-5)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _graphs(body)


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
