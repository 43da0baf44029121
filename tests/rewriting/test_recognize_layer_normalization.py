"""Layer normalization in pieces: the operator that stands for it, the same outputs, and what is left alone."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from burnish.importer import load
from burnish.rewriting.recognize_layer_normalization import recognize_layer_normalization
from oracles.recognition import (
    assert_gradients,
    assert_recognized,
    assert_untouched,
    exported,
    operators,
    random_weights,
    written,
)
from oracles.rewritten import rewritten

X = np.random.default_rng(0).normal(1, 2, size=(2, 3, 8)).astype(np.float32)
WEIGHTS = {
    "scale": np.random.default_rng(1).normal(1, 1, size=8).astype(np.float32),
    "bias": np.random.default_rng(2).normal(size=8).astype(np.float32),
}
NUMBERED = {**WEIGHTS, "two": np.array(2.0), "epsilon": np.array(1e-3)}

STATISTICS = """
    mean = ReduceMean<keepdims=1>(x, last)
    d = Sub(x, mean)
    square = Pow(d, two)
    variance = ReduceMean<keepdims=1>(square, last)
    stable = Add(variance, epsilon)
"""
PYTORCH = STATISTICS + "root = Sqrt(stable) normal = Div(d, root) scaled = Mul(normal, scale) y = Add(scaled, bias)"
INVERSE = STATISTICS + "root = Sqrt(stable) inv = Reciprocal(root) "

FORMS = {
    "commuted": STATISTICS.replace("variance, epsilon", "epsilon, variance")
    + "root = Sqrt(stable) normal = Div(d, root) scaled = Mul(scale, normal) y = Add(bias, scaled)",
    "squared by Mul": PYTORCH.replace("Pow(d, two)", "Mul(d, d)"),
    "difference computed twice": PYTORCH.replace("square = Pow(d, two)", "again = Sub(x, mean) square = Pow(again, two)"),
    "mean computed twice": PYTORCH.replace(
        "square = Pow(d, two)",
        "other = ReduceMean<keepdims=1>(x, last) again = Sub(other, x) square = Mul(again, again)",
    ),
    "root by Pow": PYTORCH.replace("Sqrt(stable)", "Pow(stable, half)"),
    "inverse by Reciprocal": INVERSE + "normal = Mul(d, inv) scaled = Mul(normal, scale) y = Add(scaled, bias)",
    "inverse by Div": INVERSE.replace("Reciprocal(root)", "Div(one, root)")
    + "normal = Mul(inv, d) scaled = Mul(normal, scale) y = Add(scaled, bias)",
    "inverse by Pow": STATISTICS
    + "inv = Pow(stable, minus_half) normal = Mul(inv, d) scaled = Mul(normal, scale) y = Add(scaled, bias)",
    "scale on the inverse": INVERSE + "gain = Mul(inv, scale) scaled = Mul(d, gain) y = Add(scaled, bias)",
    "scale before the division": STATISTICS
    + "root = Sqrt(stable) product = Mul(scale, d) scaled = Div(product, root) y = Add(scaled, bias)",
    "scale on the difference": INVERSE + "product = Mul(scale, d) scaled = Mul(product, inv) y = Add(scaled, bias)",
    "TensorFlow's batch_normalization": INVERSE
    + "gain = Mul(inv, scale) scaled = Mul(x, gain) shift = Mul(mean, gain) rest = Sub(bias, shift) y = Add(scaled, rest)",
    "Keras, mean negated": INVERSE
    + "gain = Mul(inv, scale) low = Neg(mean) shift = Mul(low, gain) rest = Add(shift, bias) scaled = Mul(x, gain) "
    "y = Add(scaled, rest)",
    "bias after the difference": INVERSE
    + "gain = Mul(inv, scale) scaled = Mul(x, gain) shift = Mul(mean, gain) rest = Sub(scaled, shift) y = Add(rest, bias)",
    "casts that change nothing": PYTORCH.replace("Pow(d, two)", "Pow(e, two)").replace(
        "d = Sub(x, mean)", "d = Sub(x, mean) e = Cast<to=1>(d)"
    ),
    "Identity between": PYTORCH.replace("Mul(normal, scale)", "Mul(same, scale)").replace(
        "normal = Div(d, root)", "normal = Div(d, root) same = Identity(normal)"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    model = assert_recognized(written(FORMS[form], X, WEIGHTS), recognize_layer_normalization, X, ["LayerNormalization"])
    assert set(model.graph.initializers) == {"scale", "bias"}
    (node,) = (node for node in model.graph if node.op_type == "LayerNormalization")
    assert [value.name for value in node.inputs] == ["x", "scale", "bias"]
    assert node.attributes["axis"].as_int() == -1
    assert node.attributes["epsilon"].as_float() == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        (PYTORCH.replace("y = Add(scaled, bias)", "").replace("scaled =", "y ="), ["x", "scale"]),
        (STATISTICS + "root = Sqrt(stable) normal = Div(d, root) y = Add(normal, bias)", ["x", None, "bias"]),
        (STATISTICS + "root = Sqrt(stable) y = Div(d, root)", ["x", None]),
        (INVERSE + "scaled = Mul(x, inv) shift = Mul(mean, inv) y = Sub(scaled, shift)", ["x", None]),
    ],
    ids=["scale", "bias", "plain", "plain, not centered"],
)
def test_without_scale_or_bias(body: str, inputs: list[str | None]) -> None:
    model = assert_recognized(written(body, X, WEIGHTS), recognize_layer_normalization, X, ["LayerNormalization"])
    (node,) = (node for node in model.graph if node.op_type == "LayerNormalization")
    assert [value.name if value.is_graph_input() or value.is_initializer() else None for value in node.inputs] == inputs
    assert set(model.graph.initializers) == {name for name in inputs if name in WEIGHTS}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 8), []),
        ((8,), ["Expand"]),
        ((3, 1), ["Expand"]),
        ((1,), ["Expand"]),
        ((), ["Expand"]),
        ((1, 3, 8), ["Squeeze"]),
        ((1, 3, 1), ["Squeeze", "Expand"]),
    ],
)
def test_scales_that_broadcast(shape: tuple[int, ...], expected: list[str]) -> None:
    body = PYTORCH.replace("last", "last_two").replace("y = Add(scaled, bias)", "").replace("scaled =", "y =")
    weights = {"scale": np.random.default_rng(3).normal(size=shape).astype(np.float32)}
    assert_recognized(written(body, X, weights), recognize_layer_normalization, X, [*expected, "LayerNormalization"])


@pytest.mark.parametrize("axes", [[2], [-1], [1, 2], [-1, -2], [0, 1, 2], [-1, 0, -2]])
def test_axes(axes: list[int]) -> None:
    body = PYTORCH.replace("last", "axes")
    proto = written(body, X, {**WEIGHTS, "axes": np.array(axes, np.int64)})
    widened = {1: [], 2: ["Expand", "Expand"], 3: ["Shape", "Expand", "Shape", "Expand"]}[len(axes)]
    model = assert_recognized(proto, recognize_layer_normalization, X, [*widened, "LayerNormalization"])
    (node,) = (node for node in model.graph if node.op_type == "LayerNormalization")
    assert node.attributes["axis"].as_int() == -len(axes)


def test_all_axes_when_none_are_given() -> None:
    body = PYTORCH.replace(", last", "").replace("scaled = Mul(normal, scale) y = Add(scaled, bias)", "y = Identity(normal)")
    model = assert_recognized(
        written(body, X, {}), recognize_layer_normalization, X, ["Shape", "Expand", "LayerNormalization", "Identity"]
    )
    (node,) = (node for node in model.graph if node.op_type == "LayerNormalization")
    assert node.attributes["axis"].as_int() == -3


def test_sizes_known_only_at_run_time() -> None:
    x = np.random.default_rng(4).normal(size=(2, 3, 5, 7)).astype(np.float32)
    body = PYTORCH.replace("last", "axes")
    weights = {name: np.random.default_rng(5).normal(size=(3, 1, 1)).astype(np.float32) for name in WEIGHTS}
    proto = written(body, x, {**weights, "axes": np.array([1, 2, 3])})
    for axis, name in ((2, "height"), (3, "width")):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    expected = ["Shape", "Expand", "Shape", "Expand", "LayerNormalization"]
    assert_recognized(proto, recognize_layer_normalization, x, expected)


def test_a_scale_that_would_repeat_the_normalized_axis_stays_outside() -> None:
    proto = written(PYTORCH, X[..., :1], WEIGHTS)
    assert_recognized(proto, recognize_layer_normalization, X[..., :1], ["LayerNormalization", "Mul", "Add"])


def test_a_scale_of_a_size_that_is_known_only_at_run_time_stays_outside() -> None:
    proto = written(PYTORCH, X, WEIGHTS)
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "width"
    expected = ["Shape", "Expand", "LayerNormalization", "Mul", "Add"]
    assert_recognized(proto, recognize_layer_normalization, X, expected)


def test_a_normalized_value_with_two_readers_keeps_both() -> None:
    body = PYTORCH + " other = Mul(normal, bias) z = Exp(other)"
    operators = ["LayerNormalization", "Mul", "Add", "Mul", "Exp"]
    assert_recognized(written(body, X, WEIGHTS, outputs="y, z"), recognize_layer_normalization, X, operators)


def test_a_modulation_by_sample_stays_outside() -> None:
    body = "gain = ReduceMax<keepdims=1>(x, last) " + PYTORCH.replace("Mul(normal, scale)", "Mul(normal, gain)")
    operators = ["ReduceMax", "LayerNormalization", "Mul", "Add"]
    assert_recognized(written(body, X, WEIGHTS), recognize_layer_normalization, X, operators)


def test_half_precision_with_float32_statistics() -> None:
    body = "wide = Cast<to=1>(x) " + PYTORCH.replace("(x,", "(wide,").replace(
        "scaled = Mul(normal, scale)", "narrow = Cast<to=10>(normal) scaled = Mul(narrow, scale)"
    )
    weights = {name: array.astype(np.float16) for name, array in WEIGHTS.items()}
    proto = written(body, X, weights, dtype="float16")
    # ONNX Runtime rounds once, the pieces three times.
    assert_recognized(proto, recognize_layer_normalization, X.astype(np.float16), ["LayerNormalization"], tolerance=2e-3)


def test_bfloat16_with_float32_statistics() -> None:
    """Not run before: ONNX Runtime has no bfloat16 Mul for the pieces on the CPU."""
    body = "wide = Cast<to=1>(x) " + PYTORCH.replace("(x,", "(wide,").replace(
        "scaled = Mul(normal, scale)", "narrow = Cast<to=16>(normal) scaled = Mul(narrow, scale)"
    )
    model = load(written(body, X, {name: array.astype(ml_dtypes.bfloat16) for name, array in WEIGHTS.items()}, dtype="bfloat16"))
    assert operators(rewritten(recognize_layer_normalization, model)) == ["LayerNormalization"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


@pytest.mark.parametrize("dtype", [11, 16])
def test_rounding_to_another_dtype_stays_outside(dtype: int) -> None:
    body = "wide = Cast<to=1>(x) " + PYTORCH.replace("(x,", "(wide,").replace(
        "scaled = Mul(normal, scale) y = Add(scaled, bias)", f"other = Cast<to={dtype}>(normal) y = Cast<to=10>(other)"
    )
    proto = written(body, X, {}, dtype="float16")
    expected = ["Cast", "LayerNormalization", "Cast", "Cast"]
    assert_recognized(proto, recognize_layer_normalization, X.astype(np.float16), expected, tolerance=1e-3)


def test_a_statistic_that_a_branch_reads_stays() -> None:
    body = (
        PYTORCH
        + """
        largest = ReduceMax<keepdims=0>(x)
        condition = Greater(largest, one)
        z = If (condition) <
            then_branch = positive () => (float p) { p = Exp(mean) },
            else_branch = negative () => (float q) { q = Neg(mean) }
        >
    """
    )
    assert_untouched(written(body, X, WEIGHTS, outputs="y, z"), recognize_layer_normalization)


def test_several_layers() -> None:
    names = "mean d square variance stable root normal scaled y".split()
    second = re.sub(rf"\b({'|'.join(names)})\b", r"\1_2", PYTORCH).replace("(x,", "(y,")
    proto = written(PYTORCH + second, X, WEIGHTS, outputs="y, y_2")
    assert_recognized(proto, recognize_layer_normalization, X, ["LayerNormalization"] * 2)


UNTOUCHED = {
    "mean is an output": (PYTORCH, "y, mean"),
    "mean has another reader": (PYTORCH + " z = Exp(mean)", "y, z"),
    "variance has another reader": (PYTORCH + " z = Exp(variance)", "y, z"),
    "deviation has another reader": (PYTORCH + " z = Exp(root)", "y, z"),
    "epsilon is computed": (PYTORCH.replace("(variance, epsilon)", "(variance, e)"), "y"),
    "axes in front": (PYTORCH.replace("last", "first"), "y"),
    "axes with a gap": (PYTORCH.replace("last", "gap"), "y"),
    "different axes": (PYTORCH.replace("ReduceMean<keepdims=1>(square, last)", "ReduceMean<keepdims=1>(square, last_two)"), "y"),
    "another x in the statistics": (PYTORCH.replace("ReduceMean<keepdims=1>(x, last)", "ReduceMean<keepdims=1>(e, last)"), "y"),
    "a third power": (PYTORCH.replace("Pow(d, two)", "Pow(d, three)"), "y"),
    "a maximum instead of a mean": (PYTORCH.replace("ReduceMean<keepdims=1>(square", "ReduceMax<keepdims=1>(square"), "y"),
    "a negative epsilon": (PYTORCH.replace("epsilon", "negative"), "y"),
    "an epsilon for each number": (PYTORCH.replace("epsilon", "several"), "y"),
    "epsilon behind the root": (
        PYTORCH.replace("stable = Add(variance, epsilon)", "bare = Sqrt(variance)").replace("Sqrt(stable)", "Add(bare, epsilon)"),
        "y",
    ),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_no_layer_normalization_stays(case: str) -> None:
    body, outputs = UNTOUCHED[case]
    weights = {
        **WEIGHTS,
        "first": np.array([0, 1]),
        "gap": np.array([0, 2]),
        "negative": np.float32(-1e-3),
        "several": np.full(8, 1e-3, np.float32),
    }
    body = "e = Exp(x) " + body
    assert_untouched(written(body, X, weights, outputs), recognize_layer_normalization)


def test_float64_keeps_its_digits() -> None:
    weights = {name: array.astype(np.float64) for name, array in NUMBERED.items()}
    assert_untouched(written(PYTORCH, X, weights, dtype="double"), recognize_layer_normalization)


def test_pieces_in_half_precision_stay() -> None:
    weights = {name: array.astype(np.float16) for name, array in NUMBERED.items()}
    assert_untouched(written(PYTORCH, X, weights, dtype="float16"), recognize_layer_normalization)


LAYERS = {
    "one axis": lambda: torch.nn.LayerNorm(8, eps=1e-3),
    "two axes": lambda: torch.nn.LayerNorm((3, 8)),
    "no bias": lambda: torch.nn.LayerNorm(8, bias=False),
    "plain": lambda: torch.nn.LayerNorm(8, elementwise_affine=False),
}


@pytest.mark.parametrize("opset", [9, 13, 16])
@pytest.mark.parametrize("layer", LAYERS)
def test_pytorch_exports(layer: str, opset: int) -> None:
    module = random_weights(LAYERS[layer]())
    proto = exported(module, X, opset)
    assert "LayerNormalization" not in {node.op_type for node in onnx.load_from_string(proto).graph.node}
    model = assert_recognized(proto, recognize_layer_normalization, X, ["LayerNormalization"])
    names = [name for name, _ in module.named_parameters()]
    assert list(model.graph.initializers) == names
    assert_gradients(proto, module, X, {name: name for name in names})


def test_the_row_where_implementations_part() -> None:
    row = np.array([[-1.83965693, -1.82964566]], np.float32)
    proto = exported(torch.nn.LayerNorm(2), row, 14)
    assert_recognized(proto, recognize_layer_normalization, row, ["LayerNormalization"], tolerance=1e-4)
