"""Evaluation gives the bits that ONNX Runtime's integer operators give of the exported file, on each engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import burnish
from burnish import surgery
from burnish.data.dataset import ArrayDataset
from burnish.rewriting.integer_operators import EXACT, GREATEST_ACTIVATION, digits
from burnish.training.trained_model import open_model
from oracles.combinations import spread
from oracles.integer_networks import Drawing

ENGINES = ("onnxruntime", "torch")


def operators(path: Path, config: dict[str, str]) -> tuple[onnxruntime.InferenceSession, Counter[str]]:
    """The file in stock ONNX Runtime, and the operators that it makes of it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(path.with_suffix(".optimized.onnx")), 3
    for key, value in config.items():
        options.add_session_config_entry(f"session.{key}", value)
    session = onnxruntime.InferenceSession(path, options)
    return session, Counter(node.op_type for node in onnx.load(path.with_suffix(".optimized.onnx")).graph.node)


def assert_same_bits(
    program: burnish.Program, state: dict[str, np.ndarray] | None, x: np.ndarray, folder: Path, **config: str
) -> Counter[str]:
    """Each engine predicts what the exported file computes; returns the operators of the file."""
    predicted = {}
    for engine in ENGINES:
        session = burnish.Session(program, engine=engine, state=state)
        predicted[engine] = session.predict({"x": x})["y"]
    runtime, found = operators(session.export(folder / "quantized.onnx"), config)
    (computed,) = runtime.run(None, {"x": x})
    for engine, array in predicted.items():
        np.testing.assert_array_equal(array, computed, err_msg=engine)
    return found


def coarse(state: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
    """A state whose scales are of few digits, so that many sums lie between two integers."""

    def rounded(scale: np.ndarray) -> np.ndarray:
        return (2 ** np.floor(np.log2(scale)) * generator.choice([1, 1.25, 1.5, 1.75], scale.shape)).astype(np.float32)

    return {name: rounded(array) if name.endswith("_scale") else array for name, array in state.items()}


FORMATS = ({}, {"weights": "int8"}, {"weights": "int4 per channel", "activations": "int8"}, {"scales": "observed"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::burnish.errors.UntrainedWeightsWarning")
def test_a_file_to_train_evaluates_as_the_file_that_is_exported(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16, 3, 6, 6)).astype(np.float32)
    proto = ir.to_proto(surgery.quantize(Drawing(0).model(), calibration=[{"x": x}]))
    arrays = coarse({tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}, generator)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
    onnx.save(proto, tmp_path / "to-train.onnx")
    program = burnish.compile(tmp_path / "to-train.onnx", loss="mse", optimizer="sgd")
    assert_same_bits(program, None, x, tmp_path)
    data = ArrayDataset({"x": x})
    files = [open_model(tmp_path / f"{name}.onnx").predict(data, 16)["y"] for name in ("to-train", "quantized")]
    np.testing.assert_array_equal(*files)


def check_drawn(seed: int, folder: Path) -> None:
    generator, options = np.random.default_rng(seed), dict(FORMATS[seed % len(FORMATS)])
    x = generator.normal(size=(16, 3, 6, 6)).astype(np.float32)
    quantized = surgery.quantize(Drawing(seed).model(), calibration=[{"x": x}], **options)
    program = burnish.compile(quantized, loss="mse", optimizer="sgd")
    state = coarse(program.initial_state(0), generator)
    found = assert_same_bits(program, state, x, folder, qdqisint8allowed="1")
    assert not {"Conv", "FusedConv", "Gemm", "MatMul", "Add", "Mul", "AveragePool", "Concat", "ReduceMean"} & found.keys()


@pytest.mark.slow
@spread("seed", range(24), test_all=6)
@pytest.mark.filterwarnings("ignore::burnish.errors.UntrainedWeightsWarning")
def test_networks_drawn_at_random(seed: int, tmp_path: Path) -> None:
    check_drawn(seed, tmp_path)


@pytest.mark.filterwarnings("ignore::burnish.errors.UntrainedWeightsWarning")
@pytest.mark.campaign
def test_many_networks_drawn_at_random(tmp_path: Path) -> None:
    for seed in range(24, 150):
        check_drawn(seed, tmp_path)


EXTREME = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, C, 6, 6] x) => (float[N, 8] y)
<float[8, 16, 3, 3] w, float[8, 1, 3, 3] d, float[32, 8, 1, 1] p, float[8, 32] v> {
    a = Conv <pads = [1, 1, 1, 1]> (x, w)
    b = Conv <group = 8> (a, d)
    c = Conv (b, p)
    e = GlobalAveragePool (c)
    f = Flatten (e)
    y = Gemm <transB = 1> (f, v)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_the_greatest_weights_and_activations_do_not_saturate(activations: str, tmp_path: Path) -> None:
    """Two products of 8 bits in a sum of 16, as kernels without VNNI have them: by default sessions, too."""
    proto = onnx.parser.parse_model(EXTREME.replace("C, 6", "16, 6"))
    for name, shape in {"w": (8, 16, 3, 3), "d": (8, 1, 3, 3), "p": (32, 8, 1, 1), "v": (8, 32)}.items():
        array = np.ones(shape, np.float32)
        array[: shape[0] // 2] = 1 if name == "p" else -1  # d makes numbers above zero of those that w makes below
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = np.ones((4, 16, 6, 6), np.float32)
    x[0], x[1, ::2] = 0, -0.25
    program = burnish.compile(
        surgery.quantize(proto, activations=activations, calibration=[{"x": x}]), loss="mse", optimizer="sgd"
    )
    for config in ({}, {"qdqisint8allowed": "1"}):
        assert_same_bits(program, None, x, tmp_path, **config)
    expected = burnish.Session(burnish.compile(proto, loss="mse", optimizer="sgd")).predict({"x": x})["y"]
    computed = onnxruntime.InferenceSession(tmp_path / "quantized.onnx").run(None, {"x": x})[0]
    assert np.abs(computed - expected).max() < 0.03 * np.abs(expected).max()


DEAD = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 3, 6, 6] x) => (float[N, 4, 4, 4] y)
<float[4, 3, 3, 3] w, float[4] gain, float[4] shift, float[4] mean, float[4] variance> {
    a = Conv (x, w)
    n = BatchNormalization (a, gain, shift, mean, variance)
    y = Relu (n)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8 per channel", "int8"])
def test_a_channel_whose_weights_are_nothing_beside_its_bias_computes_with_integers(weights: str, tmp_path: Path) -> None:
    """Its bias in steps of the weights' scale is no number of 32 bits."""
    proto, generator = onnx.parser.parse_model(DEAD), np.random.default_rng(6)
    w = generator.normal(size=(4, 3, 3, 3))
    w[0] *= 1e-14
    numbers = {"w": w, "gain": np.ones(4), "shift": np.full(4, 0.75), "mean": np.zeros(4), "variance": np.ones(4)}
    for name, array in numbers.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    x = generator.normal(size=(4, 3, 6, 6)).astype(np.float32)
    program = burnish.compile(surgery.quantize(proto, weights, calibration=[{"x": x}]), loss="mse", optimizer="sgd")
    found = assert_same_bits(program, None, x, tmp_path)
    assert found["QLinearConv"] == 1
    computed = onnxruntime.InferenceSession(tmp_path / "quantized.onnx").run(None, {"x": x})[0]
    assert np.abs(computed[:, 0] - 0.75).max() < 0.03


ATTENTION = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 5, 32] x) => (float[N, 5, 4] y) <float[32, 32] w, float[32, 4] v> {
    p = MatMul (x, w)
    t = Transpose <perm = [0, 2, 1]> (p)
    q = MatMul (p, t)
    r = MatMul (q, p)
    y = MatMul (r, v)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_products_of_activations_do_not_saturate(activations: str, tmp_path: Path) -> None:
    """ONNX Runtime turns one side of them to UINT8 and leaves the other INT8, which saturates without VNNI."""
    proto, generator = onnx.parser.parse_model(ATTENTION), np.random.default_rng(2)
    for name, shape in {"w": (32, 32), "v": (32, 4)}.items():
        array = generator.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = generator.normal(size=(16, 5, 32)).astype(np.float32)
    quantized = surgery.quantize(proto, activations=activations, calibration=[{"x": x}])
    found = assert_same_bits(burnish.compile(quantized, loss="mse", optimizer="sgd"), None, x, tmp_path)
    assert found["QLinearMatMul"] == (4 if activations == "uint8" else 1)


@pytest.mark.slow
def test_a_softmax_between_products_stays_in_float32(tmp_path: Path) -> None:
    """ONNX Runtime's integer operator takes the whole part of the reciprocal of its scale."""
    proto, generator = (
        onnx.parser.parse_model(ATTENTION.replace("r = MatMul (q,", "s = Softmax (q) r = MatMul (s,")),
        np.random.default_rng(2),
    )
    for name, shape in {"w": (32, 32), "v": (32, 4)}.items():
        array = generator.normal(size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x = generator.normal(0, 0.1, (16, 5, 32)).astype(np.float32)
    program = burnish.compile(surgery.quantize(proto, calibration=[{"x": x}]), loss="mse", optimizer="sgd")
    found = assert_same_bits(program, coarse(program.initial_state(0), generator), x, tmp_path)
    assert (found["Softmax"], found["QLinearMatMul"], found["MatMulIntegerToFloat"]) == (1, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_long_sums_are_exact(weights: str, tmp_path: Path) -> None:
    """Of more products than float32 has room for at once."""
    generator: Any = np.random.default_rng(3)
    text = """<ir_version: 8, opset_import: ["": 18]>
    g (float[N, 9000] x) => (float[N, 4] y) <float[9000, 4] w, float[4] b> {
        p = MatMul (x, w)
        y = Add (p, b)
    }"""
    proto = onnx.parser.parse_model(text)
    for name, array in {"w": generator.uniform(0.3, 1, (9000, 4)), "b": generator.normal(size=4)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    x = generator.uniform(0, 1, (8, 9000)).astype(np.float32)
    quantized = surgery.quantize(proto, weights, calibration=[{"x": x}])
    found = assert_same_bits(burnish.compile(quantized, loss="mse", optimizer="sgd"), None, x, tmp_path)
    assert found["QGemm"] == 1


def test_digits_leave_room_for_each_sum() -> None:
    for greatest in (7, 63, 127, 255):
        for terms in (1, 27, 576, 4608, 25088):
            division = digits(greatest, terms)
            assert division is not None
            count, base = division
            rest, parts = np.arange(-greatest, greatest + 1), []
            for _ in range(count - 1):
                following = np.rint(rest / base)
                parts.append(rest - following * base)
                rest = following
            parts.append(rest)
            assert sum(part * base**place for place, part in enumerate(parts)).tolist() == list(range(-greatest, greatest + 1))
            assert max(np.abs(part).max() for part in parts) * GREATEST_ACTIVATION * terms <= EXACT
    assert digits(255, 70000) is None
