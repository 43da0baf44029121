"""Dtype and shape inference of a node's outputs when it is emitted.

Elementwise operators, which most gradients consist of, are inferred here; others by the standard's inference functions, one node
at a time.

The standard's data propagation visits integer vectors element by element, at 0.5 µs and 40 bytes each: a 1 kB model with a Range
to 2**40 takes a week or all memory. The last functions of this file detect such models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph.annotations import describe_node, describe_place
from burnish.graph.attributes import attribute_value, bodies
from burnish.graph.constants import constant_array
from burnish.graph.protos import graphs_within
from burnish.graph.shapes import broadcast_shapes, dimension_product

SAME_AS_FIRST_INPUT = frozenset(
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh CumSum Elu Erf Exp Floor Gelu HardSigmoid HardSwish "
    "Identity LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus "
    "Softsign Sqrt Swish Tan Tanh ThresholdedRelu".split()
)
"""Operators whose first result has the dtype and shape of the first operand."""
BROADCAST_ARITHMETIC = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Max Mean Min Mod Mul Or PRelu Pow Sub Sum Xor".split()
)
"""Operators whose result has the dtype of the first operand and the broadcast shape of all."""
COMPARISONS = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())


@cache
def operator_schema(op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return the schema of a standard operator at an opset, or None."""
    if abs(opset) >= 2**31:  # the library refuses larger numbers
        return None
    try:
        return onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None


def operator_version(op_type: str, opset: int) -> int | None:
    """Return the version of a standard operator (its schema's ``since_version``) at an opset, or None."""
    schema = operator_schema(op_type, opset)
    return None if schema is None else int(schema.since_version)


def infer_outputs(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    """Set the dtype and shape of ``node``'s outputs if they can be inferred.

    Nodes with subgraphs are skipped: their builders know the outputs.

    Raises:
        ModelError: the operator does not accept operands of these dtypes or shapes.
    """
    if node.domain != "" or bodies(node):
        return
    first = node.inputs[0] if node.inputs else None
    output = node.outputs[0]
    if node.op_type in SAME_AS_FIRST_INPUT and first is not None:
        output.type, output.shape = first.type, _copied(first.shape)
        return
    if node.op_type in BROADCAST_ARITHMETIC and first is not None:
        output.type, output.shape = first.type, _broadcast(node.inputs)
        return
    if node.op_type in COMPARISONS:
        output.type, output.shape = ir.TensorType(ir.DataType.BOOL), _broadcast(node.inputs)
        return
    if node.op_type == "Where":
        output.type, output.shape = node.inputs[1].type, _broadcast(node.inputs)  # type: ignore[union-attr]
        return
    if node.op_type == "Cast" and first is not None:
        output.type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
        output.shape = _copied(first.shape)
        return
    if node.op_type == "Flatten" and first is not None and first.shape is not None:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        if -len(first.shape) <= axis <= len(first.shape):
            sides = first.shape.dims[:axis], first.shape.dims[axis:]
            output.type, output.shape = first.type, ir.Shape([dimension_product(side) for side in sides])
            return
    extents = constant_array(first) if node.op_type == "ConstantOfShape" else None
    if extents is not None and extents.ndim == 1 and (extents >= 0).all():
        value = node.attributes.get("value")
        output.type = ir.TensorType(ir.DataType.FLOAT if value is None else value.as_tensor().dtype)
        output.shape = ir.Shape([int(extent) for extent in extents])
        return
    _infer_by_schema(node, opset_imports)


def _infer_by_schema(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    schema = operator_schema(node.op_type, opset_imports[""])
    if schema is None:
        return
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    by_position = ir.serde.serialize_node(node)
    for index, value in enumerate(node.inputs):
        if value is None or value.name is None:
            continue
        if value.type is None:
            return
        # In a body without final names, a captured operand may have the same name as another value.
        name = by_position.input[index] = f"operand{node.inputs.index(value)}"
        types[name] = ir.serde.serialize_value(value).type
        array = constant_array(value)
        if array is not None and array.size <= 64 and value.dtype != ir.DataType.STRING:
            data[name] = onnx.numpy_helper.from_array(array, name)
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            by_position,
            types,
            data,
            opset_imports=_opset_ids(tuple(opset_imports.items())),
            ir_version=10,
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError) as error:
        raise ModelError(
            f"{describe_place(node)} cannot take these operands: {_reason(error)}. The model has values of dtypes or "
            "shapes that do not fit: export it again"
        ) from error
    for output in node.outputs:
        proto = inferred.get(output.name or "")
        if proto is None:
            continue
        output.type = ir.serde.deserialize_type_proto_for_type(proto)
        shape = ir.serde.deserialize_type_proto_for_shape(proto)
        if shape is not None:
            output.shape = shape


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


@cache
def _opset_ids(imports: tuple[tuple[str, int], ...]) -> list[onnx.OperatorSetIdProto]:
    return [onnx.helper.make_opsetid(domain, version) for domain, version in imports]


def _copied(shape: ir.Shape | None) -> ir.Shape | None:
    return None if shape is None else ir.Shape(shape.dims)


def _broadcast(inputs: Sequence[ir.Value | None]) -> ir.Shape | None:
    shapes = [value.shape for value in inputs if value is not None]
    known = [shape for shape in shapes if shape is not None]
    return broadcast_shapes(*known) if known and len(known) == len(shapes) else None


LONGEST = 1 << 22
"""Longest vector that may be propagated, in elements: 2 s."""
MOST_PARTS = 256
"""Exporters join fewer vectors, and tensors have fewer axes."""
ENDS = frozenset({"Conv", "Gemm", "MatMul", "NonZero", "Shape", "Size"})
"""Operators, in addition to reductions, whose result is not a vector of their operands."""
SHAPED = {"ConstantOfShape": 0, "Reshape": 1, "Expand": 1}
"""Operators with a shape operand (at this index), which has one element per axis of the result."""


def holds_large_integers(proto: onnx.GraphProto) -> bool:
    """True if an extent or integer constant of a graph or its subgraphs exceeds ``LONGEST``, so that a vector may too."""
    graphs = list(graphs_within(proto))
    extents = (dimension.dim_value for graph in graphs for value in graph.input for dimension in value.type.tensor_type.shape.dim)
    attributes = (attribute for graph in graphs for node in graph.node for attribute in node.attribute)
    return (
        any(extent > LONGEST for extent in extents)
        or any(_is_large(tensor) for graph in graphs for tensor in graph.initializer)
        or any(
            attribute.i > LONGEST or any(number > LONGEST for number in attribute.ints) or _is_large(attribute.t)
            for attribute in attributes
        )
    )


def joins_many_copies(graph: ir.Graph) -> bool:
    """True if a graph may repeatedly concatenate a vector with itself: thirty times give a billion elements.

    Raises:
        ModelError: such a vector is the shape of a tensor, which would have as many axes.
    """
    copies: dict[ir.Value, int] = {}
    joins_many = False
    for node in graph.all_nodes():
        if node.op_type in ENDS or node.op_type.startswith(("Reduce", "Arg")):
            continue
        parts = [1 if value is None else copies.get(value, 1) for value in node.inputs]
        place = SHAPED.get(node.op_type)
        if place is not None and place < len(parts) and parts[place] > MOST_PARTS:
            raise ModelError(
                f"{describe_node(node)} is given a shape of more than {MOST_PARTS} axes, which no runtime has: export the model "
                "again"
            )
        joins = node.op_type == "Concat" and attribute_value(node, "axis", 0) in (0, -1)
        number = sum(parts) if joins else max(parts, default=1)
        joins_many |= number > MOST_PARTS
        if number > 1:
            copies.update(dict.fromkeys(node.outputs, number))
    return joins_many


def has_long_vectors(proto: onnx.GraphProto, together: bool = False) -> bool:
    """True if a graph or a subgraph has a vector of more than ``LONGEST`` elements.

    With ``together``, also if all computed vectors have more in total.
    """
    graphs = list(graphs_within(proto))
    values = [value for graph in graphs for value in (*graph.value_info, *graph.output)]
    lengths = [dims[0].dim_value for value in values if len(dims := value.type.tensor_type.shape.dim) == 1]
    given = [dims[0].dim_value for graph in graphs for value in graph.input if len(dims := value.type.tensor_type.shape.dim) == 1]
    return max([*lengths, *given], default=0) > LONGEST or (together and sum(lengths) > LONGEST)


def _is_large(tensor: onnx.TensorProto) -> bool:
    if any(extent > LONGEST for extent in tensor.dims):
        return True
    is_integer = tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if not is_integer or tensor.data_location == onnx.TensorProto.EXTERNAL:  # inference reads no external data
        return False
    array: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return array.size > 0 and int(array.max()) > LONGEST


RANDOM_OPERATORS = frozenset(
    "Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split()
)
"""Operators that draw random numbers, or may."""
