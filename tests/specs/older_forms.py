"""Samples of the operator tables in the form that an operator had in an earlier or a later version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from burnish.graph import Builder, Tensor
from oracles.gradient_harness import as_stored, cast_inputs
from specs.operator_spec import OperatorSpec, Sample

Operands = list[np.ndarray | None]
Rewriting = Callable[[Operands, dict[str, Any]], bool]
"""Rewrites operands and attributes, in place, into the form of an earlier opset; False where there is no such form."""

IR_VERSIONS = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8}


def input_as_attribute(index: int, name: str, scalar: bool = False) -> Rewriting:
    """An operand was an attribute: a list of integers, or with ``scalar`` one number."""

    def rewrite(operands: Operands, attributes: dict[str, Any]) -> bool:
        if len(operands) <= index or operands[index] is None:
            return not (len(operands) > index + 1)
        operand = operands[index]
        assert operand is not None
        if operand.size == 0:
            return False
        attributes[name] = operand.reshape(-1)[0].item() if scalar else operand.reshape(-1).tolist()
        if len(operands) > index + 1:
            operands[index] = None
        else:
            del operands[index:]
        return True

    return rewrite


def several(*rewritings: Rewriting) -> Rewriting:
    return lambda operands, attributes: all([rewriting(operands, attributes) for rewriting in rewritings])


def without_attribute(name: str) -> Rewriting:
    def rewrite(operands: Operands, attributes: dict[str, Any]) -> bool:
        attributes.pop(name, None)
        return True

    return rewrite


def _pads_by_axis(operands: Operands, attributes: dict[str, Any]) -> bool:
    """Pad had pads for every axis and no axes."""
    if len(operands) < 4 or operands[3] is None:
        return True
    data, pads, _, axes = operands
    assert data is not None
    assert pads is not None
    assert axes is not None
    whole = np.zeros((2, data.ndim), np.int64)
    whole[:, axes % data.ndim] = pads.reshape(2, -1)
    operands[1] = whole.reshape(-1)
    del operands[3:]
    return True


def _without_steps(operands: Operands, attributes: dict[str, Any]) -> bool:
    if len(operands) > 4:
        steps = operands.pop()
        return steps is not None and bool((steps == 1).all())
    return True


def _empty_for_absent(operands: Operands, attributes: dict[str, Any]) -> bool:
    """Resize of opset 11 and 12 had empty tensors for operands that are not used."""
    for index in (1, 2):
        if len(operands) > index and operands[index] is None:
            operands[index] = np.zeros(0, np.float32)
    return True


REWRITINGS: dict[tuple[str, int], Rewriting] = {
    ("Clip", 11): several(input_as_attribute(2, "max", scalar=True), input_as_attribute(1, "min", scalar=True)),
    ("Dropout", 12): input_as_attribute(1, "ratio", scalar=True),
    ("Pad", 18): _pads_by_axis,
    ("Pad", 11): several(input_as_attribute(2, "value", scalar=True), input_as_attribute(1, "pads")),
    ("Resize", 13): _empty_for_absent,
    ("Slice", 10): several(
        _without_steps, input_as_attribute(3, "axes"), input_as_attribute(2, "ends"), input_as_attribute(1, "starts")
    ),
    ("Split", 18): without_attribute("num_outputs"),
    ("Split", 13): input_as_attribute(1, "split"),
    ("TopK", 10): input_as_attribute(1, "k", scalar=True),
    **{(op_type, 13): input_as_attribute(1, "axes") for op_type in ("Squeeze", "Unsqueeze", "ReduceSum")},
    **{
        (f"Reduce{name}", 18): input_as_attribute(1, "axes")
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
}
"""What to do with a sample for the opsets before the one named."""


def sample_model(spec: OperatorSpec, sample: Sample, opset: int, dtype: str = "float32") -> onnx.ModelProto | None:
    """The sample's node as a model of an opset, or None where the operator of that opset cannot say it.

    Inputs and outputs have the names of the gradient harness, ``input<i>`` and ``output<i>``.
    """
    operands, attributes = list(cast_inputs(sample, dtype)), as_stored(sample.attributes)
    for version in sorted({since for op_type, since in REWRITINGS if op_type == spec.op_type and since > opset}, reverse=True):
        if not REWRITINGS[spec.op_type, version](operands, attributes):
            return None
    while operands and operands[-1] is None:
        operands.pop()
    schema = onnx.defs.get_schema(spec.op_type, opset, "")
    if len(operands) > schema.max_input or not set(attributes) <= set(schema.attributes):
        return None
    names = ["" if operand is None else f"input{index}" for index, operand in enumerate(operands)]
    outputs = [f"output{index}" for index in range(sample.outputs)]
    node = helper.make_node(spec.op_type, names, outputs, name="node", **attributes)
    given = {name: operand for name, operand in zip(names, operands, strict=True) if operand is not None}
    constants = [name for index, name in enumerate(names) if name and is_constant(sample, index, operands)]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
        if name not in constants or opset < 9
    ]
    graph = helper.make_graph(
        [node],
        spec.op_type,
        infos,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(given[name], name) for name in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSIONS.get(opset, 10))
    model = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        if not output.type.tensor_type.elem_type:  # inference knows nothing of some operators in some versions
            output.CopyFrom(helper.make_tensor_value_info(output.name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))
    checked = onnx.ModelProto.FromString(model.SerializeToString())
    for output in checked.graph.output:
        output.type.tensor_type.shape.SetInParent()  # the check wants one where inference knows none
    try:
        onnx.checker.check_model(checked)
    except onnx.checker.ValidationError:
        return None
    return model


def built_model(sample: Sample, opset: int, dtype: str = "float32") -> onnx.ModelProto | None:
    """The small graph that a sample builds, as a model of an opset, or None where one of its nodes cannot be of that opset."""
    graph = ir.Graph([], [], nodes=[], name="sample", opset_imports={"": opset})
    builder, tensors = Builder(graph), list[Tensor | None]()
    operands = cast_inputs(sample, dtype)
    for index, array in enumerate(operands):
        if array is None:
            tensors.append(None)
            continue
        value = ir.Value(
            name=f"input{index}", type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape)
        )
        if is_constant(sample, index, operands):
            value.const_value = ir.tensor(array, name=value.name)
            graph.register_initializer(value)
        else:
            graph.inputs.append(value)
        tensors.append(builder.tensor(value))
    assert sample.build is not None
    results = sample.build(builder, tensors)
    for index, tensor in enumerate(results if isinstance(results, tuple | list) else (results,)):
        tensor.value.name = f"output{index}"
        graph.outputs.append(tensor.value)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return None
    return model


def is_constant(sample: Sample, index: int, operands: Sequence[np.ndarray | None]) -> bool:
    operand = operands[index]
    if index >= len(sample.inputs) or sample.inputs[index] is None:
        return True
    if sample.constants is not None:
        return index in sample.constants
    return operand is not None and operand.dtype.kind != "f"
