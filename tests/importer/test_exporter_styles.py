"""Files in the style of exporters load, have the weights that a person expects, and train."""

from __future__ import annotations

import warnings

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


@pytest.mark.slow
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


def instance_normalization(
    batch: int | str, scale: str = "w", shape: str = "5, 7", back: str = "", outputs: str = "q, q_m, q_v", more: str = ""
) -> onnx.ModelProto:
    """As PyTorch's older exporter writes it: batch normalization of one sample that has the channels of all."""
    weights = "float[3] norm_weight = {1, 1.5, 0.7}, float[3] norm_bias = {0.1, -0.2, 0.3}"
    count = 4 * 3
    ones, zeros = ", ".join(["1"] * count), ", ".join(["0"] * count)
    repeated = "w = Tile (norm_weight, n) b = Tile (norm_bias, n)"
    if scale == "folded":
        weights = (
            f"float[{count}] w = {{{', '.join(['1, 1.5, 0.7'] * 4)}}}, float[{count}] b = {{{', '.join(['0.1, -0.2, 0.3'] * 4)}}}"
        )
        repeated = ""
    elif scale == "different":
        numbers = ", ".join(map(str, range(1, count + 1)))
        weights, repeated = f"float[{count}] w = {{{numbers}}}, float[{count}] b = {{{zeros}}}", ""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18], producer_name: "pytorch">
g (float[{batch}, 3, 5, 7] x) => (float[{batch}, 2] y)
<{weights}, float[{count}] rm = {{{zeros}}}, float[{count}] rv = {{{ones}}},
  int64[1] n = {{4}}, int64[4] one = {{1, 12, {shape}}}, int64[4] back = {{{back or f"4, 3, {shape}"}}},
  float[2, 3] head_weight = {{1, -1, 0.5, 0, 2, 1}}> {{
  {repeated}
  r = Reshape (x, one)
  {outputs} = BatchNormalization <training_mode = 1> (r, w, b, rm, rv)
  s = Reshape (q, back) t = Relu (s) p = GlobalAveragePool (t) f = Flatten (p) y = Gemm <transB = 1> (f, head_weight) {more}
}}""")


@pytest.mark.parametrize("scale", ["tiled", "folded"])
def test_instance_normalization_that_is_written_as_batch_normalization(scale: str, tmp_path) -> None:
    file = instance_normalization(4, scale)
    names = {"norm_weight", "norm_bias"} if scale == "tiled" else {"w", "b"}
    x = (3 * np.random.default_rng(0).normal(size=(4, 3, 5, 7)) + 2).astype(np.float32)
    own = onnxruntime_outputs(file, {"x": x})["y"]
    model = burnish.load(file)
    operators = [node.op_type for node in model.graph]
    assert "InstanceNormalization" in operators
    assert not {"BatchNormalization", "Tile"} & {*operators}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = burnish.compile(file, optimizer="sgd:lr=0.1")
        with burnish.Session(program, threads=1) as session:
            np.testing.assert_allclose(session.predict({"x": x})["y"], own, atol=1e-5)
            session.step({"x": x, "labels": np.arange(4) % 2})
            exported = session.export(tmp_path / "tuned.onnx")
            predicted = session.predict({"x": x})["y"]
    assert {entry for entry in program.initial_state() if entry.startswith(("param", "stat"))} == {
        f"param/{name}" for name in (*names, "head_weight")
    }
    np.testing.assert_allclose(onnxruntime_outputs(onnx.load(exported), {"x": x})["y"], predicted, atol=1e-5)


def test_instance_normalization_of_one_sample_takes_any_batch() -> None:
    """What is normalized of a sample does not depend on the others."""
    file = instance_normalization(4, "folded")
    x = np.random.default_rng(0).normal(2, 3, size=(4, 3, 5, 7)).astype(np.float32)
    with burnish.Session(burnish.compile(file), threads=1) as session:
        whole = session.predict({"x": x})["y"]
        other = np.concatenate([x[:1], -x[1:]])
        np.testing.assert_allclose(session.predict({"x": other})["y"][0], whole[0], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"scale": "different"}, id="another scale for each sample"),
        pytest.param({"back": "4, 3, 7, 5"}, id="another shape after it"),
    ],
)
def test_batch_normalization_of_one_sample_that_is_no_instance_normalization(options: dict[str, str]) -> None:
    model = burnish.load(instance_normalization(4, **options))
    assert "BatchNormalization" in [node.op_type for node in model.graph]


BIASES = {
    "in a shape of its own": """end = Shape <start = 0, end = 1> (w) two = Constant <value_ints = [2]> ()
        shape = Concat <axis = 0> (end, two) zero = Constant <value = float {0}> ()
        like = CastLike (zero, x) b = Expand (like, shape)""",
    "in that of a bias": """shape = Shape <start = 0, end = 1> (w) zero = Constant <value = float {0}> ()
        b = Expand (zero, shape)""",
    "filled": "shape = Shape <start = 0, end = 1> (w) b = ConstantOfShape (shape)",
}


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("bias", BIASES)
def test_a_convolution_without_a_bias_that_is_written_with_a_broadcast_zero(bias: str, rank: int) -> None:
    """PyTorch's newer exporter gives ``Conv3d(bias=False)`` zeros of shape [channels, 2], which no runtime takes."""
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[N, 2, SPACE] x) => (float[N, 3, SPACE] y)
        { BIAS y = Conv <pads = [PADS]> (x, w, b) }"""
    for name, written in {"SPACE": "4", "PADS": "1, 1"}.items():
        text = text.replace(name, ", ".join([written] * rank))
    file = onnx.parser.parse_model(text.replace("BIAS", BIASES[bias]))
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(3, 2, *[3] * rank)).astype(np.float32)
    file.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    program = burnish.compile(file, loss="mse", optimizer="sgd:lr=0.1")
    assert program.options["trainable"] == ["w"]
    assert [node.op_type for node in burnish.load(file).graph] == ["Conv"]
    x = rng.normal(size=(2, 2, *[4] * rank)).astype(np.float32)
    padded = np.pad(x, [(0, 0), (0, 0), *[(1, 1)] * rank])
    windows = np.lib.stride_tricks.sliding_window_view(padded, [3] * rank, list(range(2, 2 + rank)))
    expected = np.moveaxis(np.tensordot(windows, weight, [[1, *range(2 + rank, 2 + 2 * rank)], list(range(1, 2 + rank))]), -1, 1)
    for engine in ("onnxruntime", "torch", "reference"):
        np.testing.assert_allclose(burnish.Session(program, engine=engine).predict({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


def test_a_bias_of_zeros_that_the_file_holds_trains() -> None:
    file = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[N, 2, 4] x) => (float[N, 1, 2] y)
        <float[1, 2, 3] w = {1, 2, 3, 4, 5, 6}, float[1] b = {0}> { y = Conv (x, w, b) }""")
    assert burnish.compile(file, loss="mse").options["trainable"] == ["w", "b"]
