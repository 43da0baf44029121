"""Weights in one place."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.importer import InitializerKind, classify_initializers, load
from oracles.onnxruntime_outputs import onnxruntime_outputs

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
EYE = "float[2, 2] {1, 0, 0, 1}"


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEADER + text)
    onnx.checker.check_model(model, full_check=True)
    return model


def weights(model: ir.Model) -> dict[str, list[float]]:
    """The weights of a model that shape and use classify as such, with their elements."""
    kinds = classify_initializers(model)
    return {
        name: value.const_value.numpy().ravel().tolist()
        for name, value in model.graph.initializers.items()
        if kinds[name] is InitializerKind.WEIGHT and value.const_value is not None
    }


def test_weights_of_two_branches_that_have_one_name() -> None:
    """One is an initializer of its branch and one a Constant; the main graph has a value of the name of the third."""
    proto = parsed("""g (float[N, 2] x, bool c) => (float[N, 2] y) {
    bias = Relu (x)
    h = If (c) <
        then_branch = one () => (u) <float[2, 2] w = {1, 2, 3, 4}> { u = MatMul (x, w) },
        else_branch = two () => (v) {
            w = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
            p = MatMul (bias, w)
            b = Constant <value = float[2] {9, 10}> ()
            v = Add (p, b)
        }
    >
    y = Neg (h)
}""")
    loaded = load(proto)
    assert weights(loaded) == {"w": [1, 2, 3, 4], "w_1": [5, 6, 7, 8], "b": [9, 10]}
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    for c in (True, False):
        fed = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(onnxruntime_outputs(loaded, fed)["y"], onnxruntime_outputs(proto, fed)["y"])


def test_a_weight_has_its_name_from_the_branch_and_not_a_value_there() -> None:
    """What a branch computes gets another name where a weight of another branch has it."""
    loaded = load(
        parsed("""g (float[N, 2] x, bool c) => (float[N, 2] y) {
    y = If (c) <
        then_branch = one () => (u) { w = Relu (x) u = Neg (w) },
        else_branch = two () => (v) <float[2, 2] w = {5, 6, 7, 8}> { v = MatMul (x, w) }
    >
}""")
    )
    assert weights(loaded) == {"w": [5, 6, 7, 8]}
    onnx.checker.check_model(ir.to_proto(loaded), full_check=True)


def test_weights_of_a_loop_and_of_a_branch_in_it() -> None:
    proto = parsed("""g (float[2, 2] x, bool c) => (float[2, 2] y)
<int64 count = {3}, bool yes = {1}> {
    y = Loop (count, yes, x) <body = step (int64 i, bool go, float[2, 2] s) => (bool on, float[2, 2] t)
        <float[2, 2] w = {1, 2, 3, 4}> {
            on = Identity (go)
            p = MatMul (s, w)
            t = If (c) <
                then_branch = one () => (u) {
                    inner = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
                    u = MatMul (p, inner)
                },
                else_branch = two () => (v) { v = Neg (p) }
            >
        }>
}""")
    loaded = load(proto)
    assert weights(loaded) == {"w": [1, 2, 3, 4], "inner": [5, 6, 7, 8]}
    fed = {"x": np.eye(2, dtype=np.float32), "c": np.array(True)}
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, fed)["y"], onnxruntime_outputs(proto, fed)["y"])


@pytest.mark.parametrize("form", ["initializer", "constant"])
def test_branches_that_return_a_weight(form: str) -> None:
    """What a body returns has to be computed there: the weight passes through an Identity."""
    names = {"one": "{1, 2, 3, 4}", "two": "{5, 6, 7, 8}"}
    branches = [
        f"() => ({name}) <float[2, 2] {name} = {elements}> {{ }}"
        if form == "initializer"
        else f"() => ({name}) {{ {name} = Constant <value = float[2, 2] {elements}> () }}"
        for name, elements in names.items()
    ]
    proto = parsed(f"""g (float[N, 2] x, bool c) => (float[N, 2] y) {{
    chosen = If (c) <then_branch = a {branches[0]}, else_branch = b {branches[1]}>
    y = MatMul (x, chosen)
}}""")
    loaded = load(proto)
    assert weights(loaded) == {"one": [1, 2, 3, 4], "two": [5, 6, 7, 8]}
    for c in (True, False):
        fed = {"x": np.eye(2, dtype=np.float32), "c": np.array(c)}
        np.testing.assert_array_equal(onnxruntime_outputs(loaded, fed)["y"], onnxruntime_outputs(proto, fed)["y"])


def test_constants_that_a_layer_reads_through_nodes_that_arrange_them() -> None:
    """As PyTorch's exporter writes the gates of an LSTM, and a quantizer or OpenVINO the weights as Constant nodes."""
    loaded = load(
        parsed("""g (float[N, 4] x) => (float[N, 4] y) <int64[1] axis = {0}> {
    first = Constant <value = float[2, 4] {1, 2, 3, 4, 5, 6, 7, 8}> ()
    second = Constant <value = float[2, 4] {8, 7, 6, 5, 4, 3, 2, 1}> ()
    joined = Concat <axis = 0> (second, first)
    turned = Transpose <perm = [1, 0]> (joined)
    y = MatMul (x, turned)
}""")
    )
    assert set(weights(loaded)) == {"first", "second"}


def test_a_constant_beside_data_or_an_initializer_is_no_weight() -> None:
    """Zeros for a bias that a layer lacks, and what pads data, are arranged with what is no constant."""
    loaded = load(
        parsed("""g (float[2, 4] x) => (float[3, 4] y, float[2, 6] z)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}> {
    zeros = Constant <value = float[4, 2] {0, 0, 0, 0, 0, 0, 0, 0}> ()
    wide = Concat <axis = 1> (w, zeros)
    z = MatMul (x, wide)
    padding = Constant <value = float[1, 4] {0, 0, 0, 0}> ()
    padded = Concat <axis = 0> (x, padding)
    y = MatMul (padded, w)
}""")
    )
    assert set(weights(loaded)) == {"w"}


def test_scalars_and_integers_of_a_branch_stay_there() -> None:
    loaded = load(
        parsed("""g (float[N, 2] x, bool c) => (float[N, 2] y) {
    y = If (c) <
        then_branch = one () => (u) <float half = {0.5}> { u = Mul (x, half) },
        else_branch = two () => (v) <int64[2] shape = {-1, 2}> { v = Reshape (x, shape) }
    >
}""")
    )
    assert not loaded.graph.initializers


NETWORK = """
<ir_version: 10, opset_import: ["": 18]>
network (float[1, 2, 4, 4] x) => (float y)
<float[1, 1] single = {5}, float[2, 2] unread = {1, 2, 3, 4}, int64[4] k = {3, 2, 3, 3}, int64[1] c = {3},
 int64[4] s = {1, 3, 1, 1}> {
  w = ConstantOfShape <value = float[1] {0.5}> (k)
  scale = ConstantOfShape <value = float[1] {1.0}> (c)
  bias = ConstantOfShape (c)
  mean = ConstantOfShape (c)
  variance = ConstantOfShape <value = float[1] {1.0}> (c)
  factor = ConstantOfShape <value = float[1] {2.0}> (c)
  shift = ConstantOfShape (c)
  factors = Reshape(factor, s)
  shifts = Reshape(shift, s)
  convolved = Conv(x, w)
  normal = BatchNormalization(convolved, scale, bias, mean, variance)
  scaled = Mul(normal, factors)
  shifted = Add(scaled, shifts)
  y = Div(shifted, single)
}"""


def kinds(text: str) -> dict[str, InitializerKind]:
    return classify_initializers(load(onnx.parser.parse_model(text)))


def test_fills_where_layers_read_weights_are_weights():
    found = kinds(NETWORK)
    weights = {name for name, kind in found.items() if kind is InitializerKind.WEIGHT}
    statistics = {name for name, kind in found.items() if kind is InitializerKind.STATISTIC}
    assert weights == {
        "w",
        "scale",
        "bias",
        "factor",
        "shift",
        "single",
    }  # beside a matrix of one element, and one that nothing reads
    assert statistics == {"mean", "variance"}
    value = load(onnx.parser.parse_model(NETWORK)).graph.initializers["w"]
    assert value.const_value is not None
    np.testing.assert_array_equal(value.const_value.numpy(), np.full((3, 2, 3, 3), 0.5, np.float32))


def test_a_fill_takes_no_memory():
    text = """
<ir_version: 10, opset_import: ["": 18]>
dense (float[1, 30000] x) => (float y) <int64[2] extents = {30000, 30000}> { w = ConstantOfShape(extents) y = Gemm(x, w) }"""
    value = load(onnx.parser.parse_model(text)).graph.initializers["w"]
    assert value.const_value is not None
    assert value.const_value.numpy().strides == (0, 0)


def test_in_a_model_with_weights_a_fill_is_what_a_layer_lacks():
    text = """
<ir_version: 10, opset_import: ["": 18]>
dense (float[1, 3] x) => (float y) <int64[1] extents = {1}, float[3, 1] held = {1, 2, 3}> {
  zero = ConstantOfShape(extents)
  y = Gemm(x, held, zero)
}"""
    assert {name for name, kind in kinds(text).items() if kind is InitializerKind.WEIGHT} == {"held"}
