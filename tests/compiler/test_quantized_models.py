"""Models whose weights are integers say so, and what to do, wherever they are refused."""

from __future__ import annotations

import warnings

import onnx
import onnx.parser
import pytest

import burnish
from burnish.errors import (
    BurnishError,
    ConfigurationError,
    GradientError,
    ModelError,
    UnsupportedOperatorError,
    UntrainedWeightsWarning,
)

HEADER = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>'
QUANTIZED = "x8, scale, zero = DynamicQuantizeLinear (x)"
EXPERTS = """<uint8[1, 4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, uint8[1, 2, 4] v = {1, 2, 3, 4, 5, 6, 7, 8},
 float[1, 4] b = {0, 0, 0, 0}, float[1, 4] s = {1, 1, 1, 1}, float[1, 2] t = {1, 1}, float[2, 1] head = {1, 1}, float[N, 2] h> {
    h = com.microsoft.QMoE (x, p, w, s, b, v, t)
    y = MatMul (h, head)
}"""

MODELS = {
    "ConvInteger": f"""g (float[N, 1, 2, 2] x) => (float[N, 1, 1, 1] y)
<uint8[1, 1, 2, 2] w = {{1, 2, 3, 4}}> {{
    {QUANTIZED}
    product = ConvInteger (x8, w, zero)
    wide = Cast <to = 1> (product)
    y = Mul (wide, scale)
}}""",
    "MatMulInteger": f"""g (float[N, 2] x) => (float[N, 2] y)
<uint8[2, 2] w = {{1, 2, 3, 4}}> {{
    {QUANTIZED}
    product = MatMulInteger (x8, w, zero)
    wide = Cast <to = 1> (product)
    y = Mul (wide, scale)
}}""",
    "DequantizeLinear": """g (float[N, 2] x) => (float[N, 2] y)
<int8[2, 2] w = {1, 2, 3, 4}, float[2] scales = {0.5, 0.25}> {
    wide = DequantizeLinear <axis = 1> (w, scales)
    y = MatMul (x, wide)
}""",
}


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} {text}")


def message(operator: str) -> str:
    return (
        rf"the weights of \S*{operator} '.*' \(output '.*'\) are integers \('w', u?int8 of shape \[.*\]\), which no gradient "
        "moves: the model is quantized. Train the model in float32 that it was quantized from, and quantize the result"
    )


@pytest.mark.parametrize("operator", MODELS)
def test_nothing_trains_where_all_weights_are_integers(operator: str) -> None:
    with pytest.raises(ConfigurationError, match="nothing would train: " + message(operator)):
        burnish.compile(parsed(MODELS[operator]), loss="mse")


@pytest.mark.parametrize(
    ("trainable", "error", "before"),
    [
        (None, GradientError, "'param/s' is differentiated through an operator without a gradient: "),
        (["head"], UnsupportedOperatorError, ""),
    ],
)
def test_an_operator_that_no_standard_has(trainable: list[str] | None, error: type[BurnishError], before: str) -> None:
    """Its scales and bias are floating-point, and ONNX Runtime runs it: neither is the reason."""
    model = parsed(f"g (float[N, 2] x, float[N, 1] p) => (float[N, 1] y) {EXPERTS}")
    with pytest.raises(error, match="^" + before + message("QMoE")):
        burnish.compile(model, loss="mse", trainable=trainable)


@pytest.mark.parametrize("behind", ["y = Identity (h)", "y = Concat <axis = 0> (h, h)"])
def test_an_operator_whose_dtype_nothing_tells(behind: str) -> None:
    """As quantizers write it: no value_info says what it gives, which is not the reason either."""
    experts = EXPERTS.replace(", float[N, 2] h>", ">").replace("y = MatMul (h, head)", behind)
    with pytest.raises(ModelError, match="^" + message("QMoE")):
        burnish.compile(parsed(f"g (float[N, 2] x, float[N, 1] p) => (float[a, b] y) {experts}"), loss="mse")


def test_biases_and_scales_that_train_alone_are_no_surprise() -> None:
    """Of a model whose matrices are integers, which quantizers leave with floating-point biases and scales for each column."""
    model = parsed(f"""g (float[N, 2] x) => (float[N, 2] y)
<uint8[2, 2] w = {{1, 2, 3, 4}}, float[2] columns = {{1, 2}}, float[2] bias = {{0, 0}}> {{
    {QUANTIZED}
    product = MatMulInteger (x8, w, zero)
    wide = Cast <to = 1> (product)
    wide_scale = Mul (scale, columns)
    h = Mul (wide, wide_scale)
    y = Add (h, bias)
}}""")
    with pytest.warns(UntrainedWeightsWarning, match=r"1 weight stays as it is: .*'w': integers, as the model is quantized"):
        burnish.compile(model, loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        burnish.compile(model, loss="mse", trainable=["bias"])


@pytest.mark.filterwarnings("ignore:1 weight stays as it is")
def test_weights_beside_those_that_are_integers_train() -> None:
    model = parsed(f"""g (float[N, 2] x) => (float[N, 2] y)
<uint8[2, 2] w = {{1, 2, 3, 4}}, float[2, 2] head = {{1, 0, 0, 1}}> {{
    {QUANTIZED}
    product = MatMulInteger (x8, w, zero)
    wide = Cast <to = 1> (product)
    h = Mul (wide, scale)
    y = MatMul (h, head)
}}""")
    assert burnish.compile(model, loss="mse").options["trainable"] == ["head"]
