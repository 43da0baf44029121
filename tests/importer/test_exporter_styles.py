"""Files in the style of exporters load, have the weights that a person expects, and train."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish.importer import InitializerKind, classify_initializers
from oracles import exporter_styles
from oracles.onnxruntime_outputs import onnxruntime_outputs

NO_WEIGHTS = {
    "tensorflow": {"model/batch_normalization.mean", "model/batch_normalization.variance"},
    "keras": {"epsilon", "scale"},
    "paddle": {"batch_norm_0.mean", "batch_norm_0.variance"},
    "ultralytics": {"two", "/model.22/Constant_9_output_0", "/model.22/Constant_12_output_0"},
}
"""The floating-point initializers that are none."""
SHAPES = {"tensorflow": (4, 8, 8, 3), "keras": (4, 6, 8), "paddle": (4, 3, 8, 8), "ultralytics": (2, 3, 8, 8)}


def arrays(file: onnx.ModelProto) -> dict[str, np.ndarray]:
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    return {name: array for name, array in tensors.items() if array.dtype == np.float32}


def with_weights(file: onnx.ModelProto, moved: dict[str, np.ndarray]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(file)
    for tensor in copy.graph.initializer:
        if tensor.name in moved:
            tensor.CopyFrom(numpy_helper.from_array(moved[tensor.name], tensor.name))
    return copy


@pytest.fixture(params=SHAPES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


def test_weights_and_their_gradients(style: str) -> None:
    """The derivative along a random direction of all weights, of the file itself as ONNX Runtime runs it."""
    file, rng = getattr(exporter_styles, style)(), np.random.default_rng(1)
    x, y = file.graph.input[0].name, file.graph.output[0].name
    feeds = {x: rng.normal(size=SHAPES[style]).astype(np.float32)}
    loaded = burnish.load(file)
    expected = onnxruntime_outputs(file, feeds)[y]
    np.testing.assert_allclose(onnxruntime_outputs(loaded, feeds)[y], expected, rtol=1e-5, atol=1e-6)
    weights = [name for name, kind in classify_initializers(loaded).items() if kind is InitializerKind.WEIGHT]
    values = arrays(file)
    assert set(weights) == values.keys() - NO_WEIGHTS[style]
    cotangent = rng.normal(size=expected.shape).astype(np.float32)
    gradients = onnxruntime_outputs(burnish.grad(file, weights), feeds | {f"cotangent:{y}": cotangent})
    direction = {name: rng.normal(size=values[name].shape).astype(np.float32) for name in weights}
    slope = sum(float((gradients[f"grad:{name}"] * direction[name]).sum()) for name in weights)
    step, sides = 1e-4, []
    for sign in (1, -1):
        moved = {name: values[name] + sign * step * direction[name] for name in weights}
        sides.append(float((onnxruntime_outputs(with_weights(file, moved), feeds)[y].astype(np.float64) * cotangent).sum()))
    size = np.sqrt(sum(float((gradients[f"grad:{name}"] ** 2).sum()) for name in weights))
    assert abs((sides[0] - sides[1]) / (2 * step) - slope) < 5e-3 * size


@pytest.mark.quick_cases(2)
def test_steps_on_both_engines(style: str) -> None:
    file = getattr(exporter_styles, style)()
    rng = np.random.default_rng(2)
    x = rng.normal(size=SHAPES[style]).astype(np.float32)
    is_detector = style == "ultralytics"
    program = burnish.compile(file, loss="mean_squared_error" if is_detector else "cross_entropy", optimizer="sgd:lr=0.01")
    target = {"targets": np.zeros((2, 7, 16), np.float32)} if is_detector else {"labels": np.arange(4)}
    losses = {}
    for engine in ("onnxruntime", "torch"):
        session = burnish.Session(program, engine=engine)
        losses[engine] = [session.step({file.graph.input[0].name: x} | target)["loss"] for _ in range(3)]
    assert losses["onnxruntime"] == sorted(losses["onnxruntime"], reverse=True)
    np.testing.assert_allclose(losses["torch"], losses["onnxruntime"], rtol=1e-5)
