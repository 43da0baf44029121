"""Batch normalization of images on ONNX Runtime: the digits that it keeps, and the operators that it becomes.

A pointwise convolution before it takes the mean off, and its gradient is summed by dot products. The oracle is float64.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Builder, Tensor
from burnish.lowering import lower_semantic_operators
from burnish.ops.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING
from burnish.passes import remove_unused

EPSILON = 1e-5
CHANNELS = 3
OUTPUTS = ("y", "mean", "variance", "dx", "dscale", "dbias")
LARGEST_ERROR = 2e-6
"""In the norm, relative to the result; of a sum, to the sum of the magnitudes of what it adds up."""


@cache
def lowered(height: int | None, width: int | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    """The layer and its gradient: x [N, 3, H, W], dy, scale and bias to ``OUTPUTS``."""
    b, (x, dy, scale, bias) = inputs(dtype, x=image(height, width), dy=image(height, width), scale=[CHANNELS], bias=[CHANNELS])
    return with_layer(b, x, dy, scale, bias)


def behind_convolution(
    height: int, width: int, attributes: dict[str, object], biased: bool, taps: int = 1, read: bool = False, rows: int = 0
) -> ir.Model:
    """The same of a convolution of x, of ``rows`` where these are others, with w; ``read`` makes its result an output besides."""
    operands = {"w": [CHANNELS, CHANNELS, taps, taps], **({"b": [CHANNELS]} if biased else {})}
    source = image(rows or height, width)
    b, (x, dy, scale, bias, *convolved) = inputs(x=source, dy=image(height, width), scale=[CHANNELS], bias=[CHANNELS], **operands)
    result = b.op("Conv", x, *convolved, **attributes)
    if read:
        b.graph.outputs.append(b.op("Relu", result).value)
    model = with_layer(b, result, dy, scale, bias)
    remove_unused(model)
    return model


def image(height: int | None, width: int | None) -> list[int | str]:
    return ["N", CHANNELS, height or "H", width or "W"]


def inputs(dtype: ir.DataType = ir.DataType.FLOAT, **shapes: list[int | str]) -> tuple[Builder, list[Tensor]]:
    values = [ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for name, shape in shapes.items()]
    b = Builder(ir.Graph(values, [], nodes=[], opset_imports={"": 21, "burnish": 1}, name="layer"))
    return b, [b.tensor(value) for value in values]


def with_layer(b: Builder, x: Tensor, dy: Tensor, scale: Tensor, bias: Tensor) -> ir.Model:
    y, mean, inverse_std, variance, centered, shift = BATCH_NORM_TRAINING.emit(x, scale, bias, builder=b, epsilon=EPSILON)
    dx, dscale, dbias = BATCH_NORM_GRAD.emit(dy, x, scale, mean, inverse_std, centered, shift)
    for name, tensor in zip(OUTPUTS, (y, mean, variance, dx, dscale, dbias), strict=True):
        output = b.op("Identity", tensor).value
        output.name = name
        b.graph.outputs.append(output)
    return lower_semantic_operators(ir.Model(b.graph, ir_version=10))


def exact(
    x: np.ndarray, dy: np.ndarray, scale: np.ndarray, bias: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``OUTPUTS`` in float64, of the float32 operands, and what their errors are relative to."""
    x, dy, scale, bias = (array.astype(np.float64) for array in (x, dy, scale, bias))
    axes, column = (0, 2, 3), (slice(None), None, None)
    mean, variance = x.mean(axes), x.var(axes)
    inverse_std = 1 / np.sqrt(variance + EPSILON)
    normalized = (x - mean[column]) * inverse_std[column]
    dscale, dbias = (dy * normalized).sum(axes), dy.sum(axes)
    count = x.size / CHANNELS
    dx = (scale * inverse_std)[column] * (dy - (dbias[column] + normalized * dscale[column]) / count)
    y = normalized * scale[column] + bias[column]
    results = {"y": y, "mean": mean, "variance": variance, "dx": dx, "dscale": dscale, "dbias": dbias}
    magnitudes = {"mean": abs(x).mean(axes), "dscale": abs(dy * normalized).sum(axes), "dbias": abs(dy).sum(axes)}
    return results, results | magnitudes


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e5])
@pytest.mark.parametrize("sample", ["alike", "darker", "constant"])
def test_digits_are_kept_whatever_the_mean_and_the_first_sample(mean, sample):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, CHANNELS, 48, 50)) + mean).astype(np.float32)
    if sample != "alike":  # an outlier among the samples, thirty deviations of the others off
        x[0] = mean - 30 if sample == "constant" else x[0] - 30
    feeds = {
        "x": x,
        "dy": rng.standard_normal(x.shape).astype(np.float32),
        "scale": rng.uniform(0.5, 2, CHANNELS).astype(np.float32),
        "bias": rng.standard_normal(CHANNELS).astype(np.float32),
    }
    given = OnnxRuntimeEngine(kernels=False).run(lowered(48, 50), feeds)
    results, magnitudes = exact(**feeds)
    for name, expected in results.items():
        error = np.linalg.norm(given[name] - expected) / np.linalg.norm(magnitudes[name])
        assert error <= LARGEST_ERROR, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ((32, 33), 1056),
        ((112, 112), 3136),
        ((64, 64), 4096),
        ((31, 32), None),
        ((79, 79), None),
        ((4099, 1), None),
        ((200, 200), None),
        ((None, 50), None),
    ],
)
def test_dot_products_are_parts_of_a_run_of_a_length_that_keeps_digits(sizes, length):
    multiplied = [node for node in lowered(*sizes).graph if node.op_type == "MatMul"]
    assert {node.inputs[0].shape[-1] for node in multiplied} == ({length} if length else set())


def convolutions(model: ir.Model) -> list[ir.Node]:
    """Those of all channels, without what applies the normalization."""
    return [node for node in model.graph if node.op_type == "Conv" and node.attributes.get("group") is None]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("height", "width"), [(24, 30), (48, 50)])
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_a_pointwise_convolution_takes_the_mean_off(height, width, biased, mean):
    rng = np.random.default_rng(0)
    model = behind_convolution(height, width, {}, biased)
    (convolution,) = convolutions(model)
    assert len(convolution.inputs) == 3
    assert "Sub" not in {reader.op_type for reader, _ in convolution.inputs[0].uses()}
    x, dy = (rng.standard_normal((4, CHANNELS, height, width)).astype(np.float32) for _ in range(2))
    # Products and their sums are exact in float32, so that what is seen is the rounding of the normalization alone.
    x = np.round(x * 64) / 64 + np.float32(mean)
    w = np.array([[1, 0.5, 0], [-0.25, 1, 0], [0, 0, 2]], np.float32)
    b = np.array([3, -1, 0.5], np.float32) if biased else np.zeros(CHANNELS, np.float32)
    feeds = {"scale": np.ones(CHANNELS, np.float32), "bias": np.zeros(CHANNELS, np.float32), "dy": dy}
    given = OnnxRuntimeEngine(kernels=False).run(
        model, {**feeds, "x": x, "w": w[:, :, None, None], **({"b": b} if biased else {})}
    )
    results, magnitudes = exact(np.einsum("oi,nihw->nohw", w, x, dtype=np.float64) + b[:, None, None], **feeds)
    for name, expected in results.items():
        error = np.linalg.norm(given[name] - expected) / np.linalg.norm(magnitudes[name])
        assert error <= LARGEST_ERROR, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("height", "width", "options"),
    [
        (24, 20, {}),  # too small
        (48, 50, {"taps": 3, "attributes": {"pads": [1, 1, 1, 1]}}),
        (48, 50, {"attributes": {"pads": [1, 0, 0, 0]}, "rows": 47}),
        (48, 50, {"attributes": {"strides": [2, 1]}, "rows": 96}),
        (48, 50, {"read": True}),
    ],
)
def test_other_convolutions_return_what_they_did(height, width, options):
    model = behind_convolution(height, width, options.pop("attributes", {}), False, **options)
    (convolution,) = convolutions(model)
    assert len(convolution.inputs) == 2
    assert "Sub" in {reader.op_type for reader, _ in convolution.outputs[0].uses()}
