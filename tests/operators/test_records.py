"""The records of operators: one for each name and version, and which operators of the standard have which field empty."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest

from burnish.graph.inference import BROADCAST_ARITHMETIC, COMPARISONS, SAME_AS_FIRST_INPUT
from burnish.operators import families
from burnish.operators.registry import Elementwise, Operator, elementwise, find_gradient, find_record, records, register
from burnish.operators.semantic import BurnishOperator, declared_operators

NEWEST = 26

WITHOUT_GRADIENT = "BitCast DequantizeLinear OptionalGetElement".split()
"""Bits have no derivative; the others are gone before a graph is differentiated."""
WITHOUT_PRECISION = """
    Acos Acosh AffineGrid Asin Asinh Atan Atanh Attention Bernoulli BitCast Cast CastLike Ceil CenterCropPad Col2Im Compress Cos
    Cosh CumProd CumSum DFT DeformConv DequantizeLinear Det DynamicQuantizeLinear Exp EyeLike Floor GRU GlobalLpPool GridSample
    Hardmax LSTM Log LogSoftmax Loop LpPool MaxRoiPool MaxUnpool Mean MelWeightMatrix Mod NegativeLogLikelihoodLoss OneHot
    OptionalGetElement Pow RNN RandomNormalLike RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare ReverseSequence RoiAlign RotaryEmbedding Round STFT Scan
    ScatterElements ScatterND Shrink Sign Sin Sinh Softmax SoftmaxCrossEntropyLoss Sqrt Tan TensorScatter TopK Unique
""".split()
"""Mixed precision computes these in float32, and what follows reads float32."""


WITHOUT_AXES = """
    BitCast MelWeightMatrix NegativeLogLikelihoodLoss OptionalGetElement SoftmaxCrossEntropyLoss TensorScatter Unique
""".split()
"""Nothing is told of these, and workers name them where samples meet them."""
NOT_REOPENED = """
    CastLike Compress DynamicQuantizeLinear EyeLike Loop MaxRoiPool MelWeightMatrix OptionalGetElement Range RoiAlign Scan Unique
""".split()
"""A model of one sample with one of these is refused where it is to take several."""


def operators_on_floats() -> list[str]:
    """The operators of the standard that take and give floating-point numbers."""
    every = [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""]
    newest = [onnx.defs.get_schema(name, NEWEST, "") for name in {each.name for each in every if each.since_version <= NEWEST}]
    return [
        schema.name
        for schema in newest
        if not schema.deprecated
        and all(any("tensor(float)" in formal.types for formal in side) for side in (schema.inputs, schema.outputs))
    ]


def test_which_operators_have_an_empty_gradient() -> None:
    found = {name: find_record(ir.node(name, [])) for name in operators_on_floats()}
    empty = {name for name, record in found.items() if record is None or not (record.gradient or record.training_form)}
    assert empty == set(WITHOUT_GRADIENT)


def test_which_operators_have_an_empty_precision() -> None:
    found = {name: find_record(ir.node(name, [])) for name in operators_on_floats()}
    assert {name for name, record in found.items() if record is None or record.precision is None} == set(WITHOUT_PRECISION)


def test_which_operators_have_empty_axes() -> None:
    found = {name: find_record(ir.node(name, [])) for name in operators_on_floats()}
    empty = {name for name, record in found.items() if record is None or not (record.axes or record.elementwise)}
    assert empty == set(WITHOUT_AXES)


def test_which_operators_are_not_reopened() -> None:
    found = {name: find_record(ir.node(name, [])) for name in operators_on_floats()}
    left = {name for name, record in found.items() if record is None or not (record.reopen or record.elementwise)}
    assert left == set(NOT_REOPENED)


def test_elementwise_operators_have_the_shape_of_the_broadcast() -> None:
    """As the standard infers it, without the short cuts for these operators."""
    shapes = {Elementwise.UNARY: ["[2, 3]"], Elementwise.BROADCAST: ["[2, 3]", "[3]", "[2, 1]"]}
    for (domain, name), versions in records().items():
        kind = versions[0].elementwise
        if kind is None:
            continue
        assert domain == "", name
        count = 3 if name == "Where" else min(2, len(shapes[kind]))
        formals = [*onnx.defs.get_schema(name, NEWEST, "").inputs] * count
        types = [min(text for text in formal.types if text.startswith("tensor("))[7:-1] for formal in formals[:count]]
        operands = ", ".join(f"{types[index]}{shapes[kind][index]} x{index}" for index in range(count))
        attributes = '<direction = "LEFT">' if name == "BitShift" else ""
        call = f"{name} {attributes} ({', '.join(f'x{index}' for index in range(count))})"
        text = f'<ir_version: 10, opset_import: ["": {NEWEST}]> g ({operands}) => (y) {{ y = {call} }}'
        model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), check_type=True, strict_mode=True)
        assert [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == [2, 3], name


def test_short_cuts_of_inference_are_for_elementwise_operators() -> None:
    beyond = {"Clip", "CumSum", "LogSoftmax", "Softmax"}
    assert {elementwise(ir.node(name, [])) for name in SAME_AS_FIRST_INPUT - beyond} == {Elementwise.UNARY}
    assert {elementwise(ir.node(name, [])) for name in BROADCAST_ARITHMETIC | COMPARISONS} == {Elementwise.BROADCAST}


def test_a_record_holds_from_its_version_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records(), ("", "Softmax"), list(records()["", "Softmax"]))
    (since_13,) = records()["", "Softmax"]
    node = ir.node("Softmax", [])
    assert find_gradient(node, 12) is None
    older = replace(since_13, since=11, gradient=lambda op, dy: dy)
    register(older)
    assert [find_gradient(node, opset) for opset in (10, 11, 12, 13, 26)] == [
        None,
        older.gradient,
        older.gradient,
        since_13.gradient,
        since_13.gradient,
    ]


def test_a_second_record_for_a_name_and_version_is_refused() -> None:
    message = r"^the operator Relu is declared twice from version 1 on: give one of the two another name, or another since=$"
    with pytest.raises(ValueError, match=message):
        register(Operator("Relu", gradient=lambda op, dy: dy))


def test_every_declared_operator_is_listed() -> None:
    """An operator that its family forgets to list would have no gradient and no lowering."""
    declared = {value for family in families.FAMILIES for value in vars(family).values() if isinstance(value, BurnishOperator)}
    assert declared == set(declared_operators().values())
