"""Operators of inference graphs, which no gradient test reaches in this form, on PyTorch's kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.engines.torch import TorchEngine
from oracles.gradient_harness import assert_close

GENERATOR = np.random.default_rng(0)


def model_of(text: str, opset: int = 21) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]>\nagraph {text}'))


NORMALIZATIONS = {
    "layer": ("y = LayerNormalization <axis = 1> (x, one, zero)", (1, 2)),
    "group": ("y = GroupNormalization <num_groups = 1> (x, channel_one, channel_zero)", (1, 2)),
    "instance": ("y = InstanceNormalization (x, channel_one, channel_zero)", (2,)),
    "mean_variance": ("y = MeanVarianceNormalization <axes = [0, 2]> (x)", (0, 2)),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (2000.0, 1.0), (1e4, 0.1)])
def test_normalization_keeps_its_digits_at_a_large_mean(name: str, mean: float, deviation: float) -> None:
    """Against float64 on the very same inputs: no more lost than some rounding errors of the result."""
    node, axes = NORMALIZATIONS[name]
    x = (mean + deviation * GENERATOR.normal(size=(4, 3, 512))).astype(np.float32)
    text = f"""(float[4, 3, 512] x, float[3, 512] one, float[3, 512] zero, float[3] channel_one, float[3] channel_zero)
        => (float[4, 3, 512] y) {{ {node} }}"""
    constants = {"one": np.ones((3, 512)), "zero": np.zeros((3, 512)), "channel_one": np.ones(3), "channel_zero": np.zeros(3)}
    inputs = {"x": x} | {constant: array.astype(np.float32) for constant, array in constants.items()}
    wide = x.astype(np.float64)
    centered = wide - wide.mean(axes, keepdims=True)
    epsilon = 0.0 if name == "mean_variance" else float(np.float32(1e-5))
    expected = centered / np.sqrt((centered**2).mean(axes, keepdims=True) + epsilon)
    assert_close(TorchEngine().run(model_of(text), inputs)["y"], expected, 1e-6, name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layer_normalization_stages_in_single_precision(dtype: str) -> None:
    text = f"""({dtype}[8, 64] x, {dtype}[64] scale) => ({dtype}[8, 64] y, float[8, 1] mean)
        {{ y, mean = LayerNormalization(x, scale) }}"""
    model = model_of(text)
    kind = ir.DataType[dtype.upper()].numpy()
    x = (100 + GENERATOR.normal(size=(8, 64))).astype(kind)
    results = TorchEngine().run(model, {"x": x, "scale": np.ones(64).astype(kind)})
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert results["mean"].dtype == np.float32
    np.testing.assert_allclose(results["mean"], wide.mean(1, keepdims=True), rtol=1e-6)
    unit = 2.0**-11 if dtype == "float16" else 2.0**-8
    np.testing.assert_allclose(results["y"].astype(np.float64), expected, rtol=1.01 * unit, atol=1e-6)


EQUAL = {
    "l1_norm": "(float[3, 4, 5] x) => (float[3, 4, 5] y) { y = LpNormalization <axis = 1, p = 1> (x) }",
    "l2_norm": "(float[3, 4, 5] x) => (float[3, 4, 5] y) { y = LpNormalization (x) }",
    "indices_behind_uneven_pads": (
        "(float[2, 3, 7, 6] x) => (float[2, 3, a, b] y, int64[2, 3, a, b] places) "
        "{ y, places = MaxPool <kernel_shape = [3, 2], strides = [2, 1], pads = [0, 1, 2, 0]> (x) }"
    ),
    "indices_by_column": (
        "(float[2, 3, 6, 4] x) => (float[2, 3, 3, 2] y, int64[2, 3, 3, 2] places) "
        "{ y, places = MaxPool <kernel_shape = [2, 2], strides = [2, 2], storage_order = 1> (x) }"
    ),
    "bytes": "(uint8[1, 2, 6, 6] x) => (uint8[1, 2, 5, 5] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }",
    "last_maximum": "(int64[3, 40] x) => (int64[3] y) { y = ArgMax <axis = 1, keepdims = 0, select_last_index = 1> (x) }",
    "last_minimum": "(int64[3, 40] x) => (int64[3, 1] y) { y = ArgMin <axis = -1, select_last_index = 1> (x) }",
    "dropout": "(float[3, 4] x) => (float[3, 4] y, bool[3, 4] kept) { y, kept = Dropout(x) }",
    "aspect_ratio": (
        "(float[1, 1, 6, 4] x) => (float[1, 1, a, b] y) { sizes = Constant <value_ints = [9, 9]> () "
        'y = Resize <axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (x, , , sizes) }'
    ),
    "crop": (
        "(float[1, 1, 8, 8] x) => (float[1, 1, a, b] y) { sizes = Constant <value_ints = [1, 1, 5, 5]> () "
        "roi = Constant <value_floats = [0.0, 0.0, 0.2, 0.3, 1.0, 1.0, 0.9, 1.2]> () "
        'y = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize", extrapolation_value = 7.0> '
        "(x, roi, , sizes) }"
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_as_onnxruntime(name: str) -> None:
    model = model_of(EQUAL[name])
    (value,) = model.graph.inputs
    assert value.dtype is not None
    assert value.shape is not None
    drawn = GENERATOR.integers(0, 9, tuple(value.shape.numpy()))
    x = drawn.astype(value.dtype.numpy()) if value.dtype.is_integer() else GENERATOR.normal(size=drawn.shape).astype(np.float32)
    expected, actual = (engine.run(model, {"x": x}) for engine in (OnnxRuntimeEngine(), TorchEngine()))
    for output, array in expected.items():
        np.testing.assert_allclose(actual[output], array, rtol=1e-5, atol=1e-6, err_msg=output)


def test_scale_and_bias_hold_one_value_per_group_before_version_21() -> None:
    text = (
        "(float[2, 4, 5] x, float[2] s, float[2] b) => (float[2, 4, 5] y) { y = GroupNormalization <num_groups = 2> (x, s, b) }"
    )
    inputs = {"x": GENERATOR.normal(size=(2, 4, 5)), "s": np.array([1.5, -2.0]), "b": np.array([0.5, 3.0])}
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    model = model_of(text, opset=18)
    expected, actual = (engine.run(model, inputs)["y"] for engine in (OnnxRuntimeEngine(), TorchEngine()))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [1, -1])
def test_root_mean_square_normalization(axis: int) -> None:
    text = f"""(float[2, 3, 8] x, float[8] scale) => (float[2, 3, 8] y)
        {{ y = RMSNormalization <axis = {axis}, epsilon = 0.001> (x, scale) }}"""
    x, scale = (GENERATOR.normal(size=shape).astype(np.float32) for shape in ((2, 3, 8), 8))
    axes = (1, 2) if axis == 1 else (2,)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axes, keepdims=True) + np.float64(np.float32(0.001))) * scale
    actual = TorchEngine().run(model_of(text, opset=23), {"x": x, "scale": scale})["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_determinants() -> None:
    x = GENERATOR.normal(size=(5, 3, 3)).astype(np.float32)
    actual = TorchEngine().run(model_of("(float[5, 3, 3] x) => (float[5] y) { y = Det(x) }"), {"x": x})["y"]
    np.testing.assert_allclose(actual, np.linalg.det(x.astype(np.float64)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulative_products(exclusive: int, reverse: int) -> None:
    x = GENERATOR.normal(size=(4, 6))
    text = f"""(double[4, 6] x) => (double[4, 6] y)
        {{ axis = Constant <value_int = 1> ()  y = CumProd <exclusive = {exclusive}, reverse = {reverse}> (x, axis) }}"""
    factors = x[:, ::-1] if reverse else x
    if exclusive:
        factors = np.concatenate([np.ones((4, 1)), factors[:, :-1]], 1)
    expected = np.cumprod(factors, 1)
    actual = TorchEngine().run(model_of(text, opset=26), {"x": x})["y"]
    np.testing.assert_allclose(actual, expected[:, ::-1] if reverse else expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("node", "mean", "deviation"),
    [
        ("RandomUniform <shape = [200, 50], low = 1.0, high = 3.0> ()", 2.0, 1 / 3**0.5),
        ("RandomNormal <shape = [200, 50], mean = -1.0, scale = 2.0> ()", -1.0, 2.0),
        ("RandomUniformLike (x)", 0.5, 1 / 12**0.5),
        ("RandomNormalLike (x)", 0.0, 1.0),
        ("Bernoulli (x)", 0.25, 0.75**0.5 / 2),
        ("Dropout (x, ratio, yes)", 0.25, 0.25 * (0.4 / 0.6) ** 0.5),
    ],
)
def test_what_is_drawn_has_its_distribution(node: str, mean: float, deviation: float) -> None:
    text = f"""(float[200, 50] x) => (float[200, 50] y)
        {{ ratio = Constant <value = float {{0.4}}> ()  yes = Constant <value = bool {{1}}> ()  y = {node} }}"""
    drawn = TorchEngine().run(model_of(text), {"x": np.full((200, 50), 0.25, np.float32)})["y"]
    assert drawn.mean() == pytest.approx(mean, abs=6 * deviation / 100)
    assert drawn.std() == pytest.approx(deviation, rel=0.06)
