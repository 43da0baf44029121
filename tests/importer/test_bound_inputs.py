"""Inputs that are fixed to a value: what they become, and what does not fit them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.errors import ConfigurationError
from burnish.importer import InitializerKind, classify_initializers, load
from oracles.onnxruntime_outputs import onnxruntime_outputs

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
SWITCHED = """g (float[N, 2] x, int64 sr) => (float[N, 2] y) <int64 rate = {16000}> {
    wide = Equal (sr, rate)
    y = If (wide) <
        then_branch = one () => (u) <float[2, 2] w = {1, 2, 3, 4}> { u = MatMul (x, w) },
        else_branch = two () => (v) {
            slow = Constant <value = int64 {8000}> ()
            narrow = GreaterOrEqual (sr, slow)
            v = If (narrow) <
                then_branch = three () => (a) <float[2, 2] w = {5, 6, 7, 8}> { a = MatMul (x, w) },
                else_branch = four () => (b) { b = Neg (x) }
            >
        }
    >
}"""
RECURRENT = """g (float[time, batch, 3] x, float{h} h, float{c} c) => (float[time, 1, batch, 2] y, float[1, batch, 2] hn)
<float[1, 8, 3] W, float[1, 8, 2] R> {{
    y, hn = LSTM <hidden_size = 2> (x, W, R, , , h, c)
}}"""


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + text)


def unnamed(text: str) -> onnx.ModelProto:
    """A model whose extents ``?`` are open and have no name."""
    model = parsed(text.replace("?", "unnamed"))
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "unnamed":
                dim.Clear()
    return model


def recurrent(h: str = "[1, batch, 2]", c: str = "[1, batch, 2]") -> onnx.ModelProto:
    model = parsed(RECURRENT.format(h=h, c=c))
    del model.graph.initializer[:]
    generator = np.random.default_rng(1)
    for name, shape in (("W", (1, 8, 3)), ("R", (1, 8, 2))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name))
    return model


def of_input(declared: str) -> onnx.ModelProto:
    """A model that reads an input ``v`` beside ``x``, whatever its dtype and shape."""
    return parsed(f"g (float[N, 2] x, {declared} v) => (float[N, 2] y, {declared} out) {{ y = Relu (x) out = Identity (v) }}")


@pytest.mark.parametrize(("rate", "expected"), [(16000, [1, 2, 3, 4]), (8000, [5, 6, 7, 8]), (4000, None)])
def test_an_input_that_decides_branches(rate: int, expected: list[int] | None) -> None:
    """Also those inside of a branch; the weights of the others are gone."""
    proto = parsed(SWITCHED)
    loaded = load(proto, bind={"sr": rate})
    assert [value.name for value in loaded.graph.inputs] == ["x"]
    assert "If" not in {node.op_type for node in loaded.graph}
    floats = {name: v.const_value.numpy() for name, v in loaded.graph.initializers.items() if v.dtype == ir.DataType.FLOAT}
    assert {name: array.ravel().tolist() for name, array in floats.items()} == ({"w": expected} if expected else {})
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    given = onnxruntime_outputs(proto, {"x": x, "sr": np.array(rate)})["y"]
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"x": x})["y"], given)


def test_a_state_of_zeros_follows_the_batch_of_the_other_inputs() -> None:
    proto = recurrent()
    loaded = load(proto, bind={"h": 0, "c": np.float32(0)})
    assert [value.name for value in loaded.graph.inputs] == ["x"]
    kinds = classify_initializers(loaded)
    assert {name for name, kind in kinds.items() if kind is InitializerKind.WEIGHT} == {"W", "R"}
    for batch in (1, 4):
        x = np.random.default_rng(0).normal(size=(5, batch, 3)).astype(np.float32)
        state = np.zeros((1, batch, 2), np.float32)
        given = onnxruntime_outputs(proto, {"x": x, "h": state, "c": state})
        for name, array in onnxruntime_outputs(loaded, {"x": x}).items():
            np.testing.assert_array_equal(array, given[name])


def test_an_open_dimension_without_a_name_is_that_of_the_batch() -> None:
    """Where it is the only one of its input, and where states have their samples; elsewhere nothing tells."""
    loaded = load(unnamed("g (float[?, 2] x, float[2, ?, 2] h) => (float[?, ?, ?] y) { y = Add (x, h) }"), bind={"h": 3})
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"x": x})["y"], np.broadcast_to(x + 3, (2, 5, 2)))
    cache = unnamed("g (float[?, 2] x, float[1, 2, ?, 2] h) => (float[?, ?, ?, ?] y) { y = Add (x, h) }")
    with pytest.raises(ConfigurationError, match=r"'h' has the shape \[1, 2, h_dim_2, 2\], and no input that is left says what"):
        load(cache, bind={"h": 3})


def test_an_array_with_all_axes_says_the_open_ones() -> None:
    loaded = load(of_input("float[T, 2]"), bind={"v": np.arange(6, dtype=np.float32).reshape(3, 2)})
    outputs = onnxruntime_outputs(loaded, {"x": np.zeros((1, 2), np.float32)})
    assert outputs["out"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [
        ("float", 2, 2.0),
        ("double[2]", [1, 2.5], [1, 2.5]),
        ("float16[2, 2]", np.float64(0.5), [[0.5, 0.5], [0.5, 0.5]]),
        ("int64[3]", [[1, 2, 3]][0], [1, 2, 3]),
        ("int32[2, 2]", np.array([1, 2], np.int64), [[1, 2], [1, 2]]),
        ("uint8", 255, 255),
        ("bool", True, True),
        ("string[1]", "text", ["text"]),
        ("bfloat16[1]", ml_dtypes.bfloat16(1.5), [1.5]),
    ],
)
def test_values_of_each_dtype(declared: str, given: Any, expected: Any) -> None:
    loaded = load(of_input(declared), bind={"v": given})
    assert [value.name for value in loaded.graph.inputs] == ["x"]
    out = burnish.engines.get("reference").run(loaded, {"x": np.zeros((1, 2), np.float32)})["out"]
    assert out.tolist() == expected
    assert loaded.graph.outputs[1].dtype == load(of_input(declared)).graph.outputs[1].dtype


@pytest.mark.parametrize(
    ("declared", "given", "message"),
    [
        ("int64", 1.5, r"the input 'v' is int64, and is given 1\.5 \(float64\): give integers"),
        ("int64", True, r"the input 'v' is int64, and is given True \(bool\): give integers"),
        ("bool", 1, r"the input 'v' is bool, and is given 1 \(int64\): give true or false"),
        ("float", "a", r"the input 'v' is float, and is given 'a' \(<U1\): give numbers"),
        ("string", 1, r"the input 'v' is string, and is given 1 \(int64\): give a text"),
        ("float", 1j, r"the input 'v' is float, and is given 1j \(complex128\): give numbers"),
        ("float", None, r"the input 'v' is float, and is given None \(object\): give numbers"),
        ("uint8", 256, r"the input 'v' is uint8, which does not hold 256 \(int64\): give a number in its range"),
        ("float16", 1e6, r"the input 'v' is float16, which does not hold 1000000\.0 \(float64\)"),
        ("string[2]", ["a", "b"], r"the input 'v' is given a list with texts: give one text or number"),
        ("float[2]", [[1, 2], [3]], r"the input 'v' is given rows of different lengths"),
        ("float[2]", [1, 2, 3], r"the input 'v' has the shape \[2\], and is given an array of shape \[3\]"),
        ("float", [1], r"the input 'v' has the shape \[\], and is given an array of shape \[1\]"),
        ("float[N, 2]", [[1, 2], [3, 4]], r"the input 'v' is given 2 along 'N', which the input 'x' leaves open"),
        ("float[T, 2]", 1, r"shape \[T, 2\], and no input that is left says what 'T' is: give an array with all its axes"),
    ],
)
def test_values_that_do_not_fit(declared: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(of_input(declared), bind={"v": given})


def test_names_that_are_no_inputs() -> None:
    proto = recurrent(c="[1, batch, 2]")
    with pytest.raises(
        ConfigurationError, match=r"no input 'hh' \(did you mean 'h'\?\); its inputs are 'x', 'h', 'c', their open"
    ):
        load(proto, bind={"hh": 0})
    with pytest.raises(ConfigurationError, match="bind: 'W' is a weight or a constant of the model, and no input"):
        load(proto, bind={"W": 0})
    with pytest.raises(ConfigurationError, match="bind: no input would be left"):
        load(proto, bind={"x": np.zeros((2, 2, 3)), "h": np.zeros((1, 2, 2)), "c": np.zeros((1, 2, 2))})
    with pytest.raises(ConfigurationError, match=r"bind must be \{input: value\}, such as"):
        load(proto, bind="sr=16000")  # type: ignore[arg-type]
    sequence = parsed("g (float[N, 2] x, seq(float[2]) s) => (float[N, 2] y) { y = Relu (x) }")
    with pytest.raises(ConfigurationError, match="bind: the input 's' is no tensor"):
        load(sequence, bind={"s": 0})


def test_an_open_dimension_takes_an_extent() -> None:
    """A branch may hang on an extent that the file leaves open."""
    text = """g (float[N, T] x) => (float[] y) <int64 one = {1}, int64[1] axis = {1}> {
    shape = Shape (x)
    extent = Gather (shape, one)
    narrow = Equal (extent, one)
    y = If (narrow) <
        then_branch = a () => (squeezed) { squeezed = Squeeze (x, axis) },
        else_branch = b () => (same) { same = Identity (x) }
    >
}"""
    proto = parsed(text.replace("float[] y", "float y"))
    assert "If" in {node.op_type for node in load(proto).graph}
    loaded = load(proto, bind={"T": 1})
    assert [node.op_type for node in loaded.graph if node.op_type != "Constant"] == ["Squeeze"]
    assert loaded.graph.inputs[0].shape == ir.Shape(["N", 1])
    for extent in (-1, 1.5, "a"):
        with pytest.raises(ConfigurationError, match="'T' is an open dimension of the inputs, which takes an integer"):
            load(proto, bind={"T": extent})


def test_an_extent_of_zero_takes_inputs_away() -> None:
    proto = parsed("""g (float[N, T] x, float[N, P] cache) => (float[N, S] y) { y = Concat <axis = 1> (cache, x) }""")
    loaded = load(proto, bind={"P": 0})
    assert [value.name for value in loaded.graph.inputs] == ["x"]
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"x": x})["y"], x)
    with pytest.raises(ConfigurationError, match="no input would be left"):
        load(proto, bind={"N": 0})


def test_a_value_is_no_weight_even_where_a_layer_reads_it() -> None:
    """What a file holds at these places as a constant would train."""
    proto = parsed("""g (float[N, 2] x, float[2, 2] table, float t, bool c) => (float[N, 2] y)
<int64[1] axis = {0}> {
    p = If (c) <
        then_branch = one () => (u) { u = MatMul (x, table) },
        else_branch = two () => (v) { v = Neg (x) }
    >
    row = Unsqueeze (t, axis)
    y = Add (p, row)
}""")
    loaded = load(proto, bind={"table": [[1, 2], [3, 4]], "t": 0.5, "c": True})
    assert all(kind is InitializerKind.CONSTANT for kind in classify_initializers(loaded).values())
    assert all(kind is InitializerKind.CONSTANT for kind in classify_initializers(load(ir.to_proto(loaded))).values())


def test_models_of_one_sample_open_their_batch_beside_it() -> None:
    proto = recurrent(h="[1, 1, 2]", c="[1, 1, 2]")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    opened = load(proto, batch="open", bind={"h": 0, "c": 0})
    x = np.random.default_rng(0).normal(size=(5, 3, 3)).astype(np.float32)
    together = onnxruntime_outputs(opened, {"x": x})["hn"]
    state = np.zeros((1, 1, 2), np.float32)
    for sample in range(3):
        alone = onnxruntime_outputs(proto, {"x": x[:, sample : sample + 1], "h": state, "c": state})["hn"]
        np.testing.assert_allclose(together[:, sample : sample + 1], alone, rtol=1e-6)


def test_gradients_of_a_model_with_fixed_inputs() -> None:
    gradients = burnish.grad(parsed(SWITCHED), ["w"], bind={"sr": 8000})
    assert [value.name for value in gradients.graph.inputs] == ["x", "cotangent:y"]
    x, dy = (np.random.default_rng(seed).normal(size=(4, 2)).astype(np.float32) for seed in (0, 1))
    found = onnxruntime_outputs(gradients, {"x": x, "cotangent:y": dy})["grad:w"]
    np.testing.assert_allclose(found, x.T @ dy, rtol=1e-6)
    with pytest.raises(ConfigurationError, match="no input or initializer 'sr'"):
        burnish.grad(parsed(SWITCHED), ["sr"], bind={"sr": 8000})
