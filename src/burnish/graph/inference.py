"""Dtype and shape of a node's outputs, inferred when the node is emitted.

Elementwise operators, most of what gradients consist of, are inferred here directly; everything else goes through the
standard's own inference functions, one node at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from burnish.graph.constants import constant_array
from burnish.graph.shapes import broadcast_shapes

SAME_AS_FIRST_INPUT = frozenset(
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity "
    "LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign "
    "Sqrt Swish Tan Tanh ThresholdedRelu CumSum".split()
)
BROADCAST_ARITHMETIC = frozenset(
    "Add And BitwiseAnd BitwiseOr BitwiseXor BitShift Div Max Mean Min Mod Mul Or PRelu Pow Sub Sum Xor".split()
)
BROADCAST_COMPARISON = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())


def operator_version(op_type: str, opset: int) -> int | None:
    """Return the version of a standard operator (its schema's ``since_version``) at an opset, None if there is none."""
    try:
        return int(onnx.defs.get_schema(op_type, opset, "").since_version)
    except onnx.defs.SchemaError:
        return None


def infer_outputs(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    """Fill in the dtype and shape of ``node``'s outputs where they can be known; leave them as they are otherwise."""
    if node.domain not in ("", "ai.onnx"):
        return
    first = node.inputs[0] if node.inputs else None
    output = node.outputs[0]
    if node.op_type in SAME_AS_FIRST_INPUT and first is not None:
        output.type, output.shape = first.type, _copied(first.shape)
        return
    if node.op_type in BROADCAST_ARITHMETIC and first is not None:
        output.type, output.shape = first.type, _broadcast(node.inputs)
        return
    if node.op_type in BROADCAST_COMPARISON:
        output.type, output.shape = ir.TensorType(ir.DataType.BOOL), _broadcast(node.inputs)
        return
    if node.op_type == "Where":
        output.type, output.shape = node.inputs[1].type, _broadcast(node.inputs)  # type: ignore[union-attr]
        return
    if node.op_type == "Cast" and first is not None:
        output.type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
        output.shape = _copied(first.shape)
        return
    _infer_by_schema(node, opset_imports)


def _infer_by_schema(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_imports[""], "")
    except onnx.defs.SchemaError:
        return
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or value.name is None:
            continue
        if value.type is None:
            return
        types[value.name] = ir.serde.serialize_value(value).type
        array = constant_array(value)
        if array is not None and array.size <= 64:
            data[value.name] = onnx.numpy_helper.from_array(array, value.name)
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            ir.serde.serialize_node(node),
            types,
            data,
            opset_imports=[onnx.helper.make_opsetid(domain, version) for domain, version in opset_imports.items()],
            ir_version=10,
        )
    except (onnx.shape_inference.InferenceError, RuntimeError):
        return
    for output in node.outputs:
        proto = inferred.get(output.name or "")
        if proto is None:
            continue
        output.type = ir.serde.deserialize_type_proto_for_type(proto)
        shape = ir.serde.deserialize_type_proto_for_shape(proto)
        if shape is not None:
            output.shape = shape


def _copied(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape(shape.dims)


def _broadcast(inputs: Sequence[ir.Value | None]) -> ir.Shape | None:
    shapes = [value.shape for value in inputs if value is not None]
    known = [shape for shape in shapes if shape is not None]
    return broadcast_shapes(*known) if known and len(known) == len(shapes) else None
