"""What a model has in sixteen bits, computed in float32."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish.graph.shapes import has_sixteen_bit_values
from burnish.rewriting.change_dtypes import compute_in_float32
from oracles.rewritten import rewritten

SIXTEEN = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


# The text format takes the bits of a float16: 14336 is 0.5; 15360, 16384 and 16896 are 1, 2 and 3.


def model(body: str, weights: str = "", opset: int = 18, outputs: str = "float16[N, 3] y") -> ir.Model:
    text = f"""<ir_version: 10, opset_import: ["": {opset}]>
network (float16[N, 3] x, bool flag) => ({outputs}) <{weights}> {{ {body} }}"""
    return burnish.load(onnx.parser.parse_model(text))


def narrow_values(graph: ir.Graph) -> list[str | None]:
    return [value.name for node in graph.all_nodes() for value in node.outputs if value.dtype in SIXTEEN]


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, inputs)


BODY = """
    shape = Shape (x)
    zeros = ConstantOfShape <value = float16[1] {16384}> (shape)
    sum = Add (x, zeros)
    chosen = If (flag) <
        then_branch = then () => (float16[N, 3] a) { half_of = Constant <value = float16 {14336}> () a = Mul (sum, half_of) },
        else_branch = otherwise () => (float16[N, 3] b) { c = Cast <to = 1> (sum) d = Exp (c) b = Cast <to = 10> (d) }
    >
    normalized = LayerNormalization <stash_type = 10> (chosen, w)
    y = Mul (normalized, w)
"""


@pytest.mark.parametrize("flag", [False, True])
def test_bodies_constants_and_casts_are_raised_and_the_signature_stays(flag: bool) -> None:
    before = model(BODY, "float16[3] w = {15360, 16384, 16896}")
    after = rewritten(compute_in_float32, before.clone(), keep_outputs=True)
    assert [value.dtype for value in after.graph.inputs] == [ir.DataType.FLOAT16, ir.DataType.BOOL]
    assert narrow_values(after.graph) == ["y"]
    (layer,) = (node for node in after.graph if node.op_type == "LayerNormalization")
    assert layer.attributes["stash_type"].as_int() == ir.DataType.FLOAT
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float16)
    fed = {"x": x, "flag": np.array(flag)}
    summed = x.astype(float) + 2
    chosen = summed / 2 if flag else np.exp(summed)
    centred = chosen - chosen.mean(1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * np.square([1.0, 2.0, 3.0])
    (found,) = run(after, **fed)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_casts_pass_values_on_under_their_names() -> None:
    """A name can be asked for (outputs=...), and nothing but an output is computed from what bears it."""
    raised = rewritten(compute_in_float32, model("wide = Cast <to = 1> (x) narrow = Cast <to = 10> (wide) y = Neg (narrow)"))
    named = {value.name: node.op_type for node in raised.graph for value in node.outputs}
    assert named["wide"] == named["narrow"] == "Identity"
    (negation,) = (node for node in raised.graph if node.op_type == "Neg")
    producer = negation.inputs[0].producer() if negation.inputs[0] is not None else None
    assert producer is not None
    assert producer.op_type == "Cast"
    assert raised.graph.outputs[0].dtype == ir.DataType.FLOAT
    assert raised.graph.outputs[0].name == "y"


def test_inputs_are_raised_on_demand() -> None:
    raised = rewritten(compute_in_float32, model("y = Neg (x)"), keep_inputs=False)
    assert raised.graph.inputs[0].dtype == ir.DataType.FLOAT
    assert not has_sixteen_bit_values(raised)


def test_bits_are_copied_of_the_type_that_they_are_of() -> None:
    raised = rewritten(
        compute_in_float32,
        model(
            "doubled = Add (x, x) bits = BitCast <to = 5> (doubled) back = BitCast <to = 10> (bits) y = Add (back, w)",
            "float16[1] w = {15360}",
            opset=26,
        ),
        keep_outputs=True,
    )
    first, second = (node for node in raised.graph if node.op_type == "BitCast")
    assert first.inputs[0] is not None
    assert first.inputs[0].dtype == ir.DataType.FLOAT16
    assert second.outputs[0].dtype == ir.DataType.FLOAT16
    x = np.array([[0.5, -1.0, 3.0]], np.float16)
    found = onnx.reference.ReferenceEvaluator(ir.to_proto(raised)).run(None, {"x": x, "flag": np.array(True)})[0]
    np.testing.assert_array_equal(found, x * 2 + 1)


def test_large_weights_take_memory_only_while_they_are_read() -> None:
    array = np.arange(2048, dtype=np.float16)
    source = model("y = Neg (x)")
    source.graph.register_initializer(ir.Value(name="w", const_value=ir.Tensor(array, name="w"), type=ir.TensorType(SIXTEEN[0])))
    tensor = rewritten(compute_in_float32, source).graph.initializers["w"].const_value
    assert isinstance(tensor, ir.LazyTensor)
    assert tensor.dtype == ir.DataType.FLOAT
    np.testing.assert_array_equal(tensor.numpy(), array.astype(np.float32))


def test_what_has_no_such_values_is_known() -> None:
    assert has_sixteen_bit_values(model("y = Neg (x)"))
    text = """<ir_version: 10, opset_import: ["": 18]> network (float[N] x) => (float[N] y) { y = Neg (x) }"""
    assert not has_sixteen_bit_values(burnish.load(onnx.parser.parse_model(text)))
