"""Operators that compute with integers, as ONNX Runtime quantizes: its kernels' integers, and gradients straight through."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import ModelError
from oracles.onnxruntime_outputs import onnxruntime_outputs

RNG = np.random.default_rng(0)


def unsigned(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def signed(*shape: int) -> np.ndarray:
    """Integers of 7 bits: ONNX Runtime's kernels add products in 16 bits and saturate, on processors without VNNI."""
    return RNG.integers(-64, 65, shape).astype(np.int8)


def at(scale: float, zero: int = 0, dtype: type = np.uint8) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the zero point of some integers."""
    return np.array(scale, np.float32), np.array(zero, dtype)


def by_column(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers of a weight with a scale for each of its last axis, and zeros."""
    return signed(*shape), RNG.uniform(0.02, 0.04, shape[-1]).astype(np.float32), np.zeros(shape[-1], np.int8)


def by_channel(*shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return signed(*shape), RNG.uniform(0.02, 0.04, shape[0]).astype(np.float32), np.zeros(shape[0], np.int8)


X = (*at(0.05, 120),)
Y = (*at(0.1, 128),)
OTHER = (*at(0.07, 11),)
PROBABILITY = (*at(1 / 256),)
SUMMAND = RNG.integers(-500, 500, 4).astype(np.int32)
BIAS = RNG.normal(size=4).astype(np.float32)
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
ROWS = unsigned(2, 5)

# Operator, inputs, attributes, and which inputs are data.
CASES: list[tuple[str, list[Any], dict[str, Any], list[int]]] = [
    ("QLinearConv", [unsigned(2, 3, 8, 8), *X, *by_channel(4, 3, 3, 3), *Y, SUMMAND], {"pads": [1] * 4, "strides": [2, 2]}, [0]),
    ("QLinearConv", [unsigned(2, 3, 8, 8), *X, signed(4, 3, 1, 1), *at(0.02, 0, np.int8), *Y], {}, [0]),
    ("com.microsoft.QLinearConv", [unsigned(2, 8, 8, 3), *X, *by_channel(4, 3, 3, 3), *Y, SUMMAND], {"channels_last": 1}, [0]),
    ("QLinearMatMul", [ROWS, *X, *by_column(5, 4), *Y], {}, [0]),
    ("QLinearMatMul", [ROWS, *X, signed(5, 4), np.array([0.02], np.float32), np.array([3], np.int8), *Y], {}, [0]),
    ("com.microsoft.QGemm", [ROWS, *X, *by_column(5, 4), SUMMAND, *Y], {}, [0]),
    ("com.microsoft.QGemm", [ROWS, *X, signed(4, 5), *at(0.02, 0, np.int8), SUMMAND], {"transB": 1, "alpha": 2.0}, [0]),
    ("com.microsoft.QLinearAdd", [ROWS, *X, unsigned(2, 5), *OTHER, *Y], {}, [0, 3]),
    ("com.microsoft.QLinearMul", [ROWS, *X, unsigned(5), *OTHER, *Y], {}, [0]),
    ("com.microsoft.QLinearSigmoid", [ROWS, *X, *PROBABILITY], {}, [0]),
    ("com.microsoft.QLinearLeakyRelu", [ROWS, *X, *X], {"alpha": 0.2}, [0]),
    ("com.microsoft.QLinearSoftmax", [unsigned(2, 5, 3), *X, *PROBABILITY], {"opset": 13, "axis": 1}, [0]),
    ("com.microsoft.QLinearSoftmax", [unsigned(2, 5, 3), *X, *PROBABILITY], {"opset": 12, "axis": 1}, [0]),
    ("com.microsoft.QLinearSoftmax", [unsigned(2, 5, 3), *X, *PROBABILITY], {"opset": 12, "axis": 2}, [0]),
    ("com.microsoft.QLinearAveragePool", [unsigned(2, 3, 8, 8), *X, *X], {"kernel_shape": [3, 3], "pads": [1] * 4}, [0]),
    ("com.microsoft.QLinearAveragePool", [unsigned(2, 8, 8, 3), *X, *X], {"kernel_shape": [2, 2], "channels_last": 1}, [0]),
    ("com.microsoft.QLinearGlobalAveragePool", [unsigned(2, 3, 8, 8), *X, *at(0.01, 128)], {}, [0]),
    ("com.microsoft.QLinearGlobalAveragePool", [unsigned(2, 8, 8, 3), *X, *at(0.01, 128)], {"channels_last": 1}, [0]),
    ("com.microsoft.NhwcMaxPool", [unsigned(2, 8, 8, 3)], {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 2]}, [0]),
    ("com.microsoft.QLinearConcat", [*Y, ROWS, *X, unsigned(2, 3), *OTHER], {"axis": 1}, [2, 5]),
    ("com.microsoft.QLinearConcat", [*at(0.1, 1, np.int8), signed(2, 5), *at(0.05, 2, np.int8)], {"axis": 1}, [2]),
    ("com.microsoft.QLinearWhere", [RNG.random((2, 5)) > 0.5, ROWS, *X, unsigned(2, 5), *OTHER, *Y], {}, [0, 1, 4]),
    ("com.microsoft.MatMulIntegerToFloat", [ROWS, signed(5, 4), X[0], *by_column(5, 4)[1:2], X[1], None, BIAS], {}, [0]),
    ("com.microsoft.DynamicQuantizeMatMul", [RNG.normal(size=(2, 5)).astype(np.float32), *by_column(5, 4), BIAS], {}, [0]),
    (
        "com.microsoft.QAttention",
        [
            unsigned(2, 4, 6),
            signed(6, 36),
            RNG.normal(size=36).astype(np.float32),
            np.float32(0.02),
            np.float32(0.01),
            MASK,
            X[1],
            np.int8(0),
        ],
        {"num_heads": 3},
        [0],
    ),
]


def model_of(op_type: str, inputs: list[Any], attributes: dict[str, Any], data: list[int], kind: int) -> onnx.ModelProto:
    domain, _, name = op_type.rpartition(".")
    arrays = {f"input{index}": np.asarray(array) for index, array in enumerate(inputs) if array is not None}
    names = [f"input{index}" if array is not None else "" for index, array in enumerate(inputs)]
    fed = [names[index] for index in data]
    kinds = {each: helper.np_dtype_to_tensor_dtype(arrays[each].dtype) for each in fed}
    graph = helper.make_graph(
        [helper.make_node(name, names, ["y"], name="node", domain=domain, **attributes)],
        "node",
        [helper.make_tensor_value_info(each, kinds[each], ["n", *arrays[each].shape[1:]]) for each in fed],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, each) for each, array in arrays.items() if each not in fed],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def kind_of(op_type: str, inputs: list[Any]) -> int:
    name = op_type.rpartition(".")[2]
    if name in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention") or (name == "QGemm" and len(inputs) < 8):
        return TensorProto.FLOAT
    is_signed = name == "QLinearConcat" and inputs[1].dtype == np.int8
    return TensorProto.INT8 if is_signed else TensorProto.UINT8


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "data"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_the_integers_are_the_kernels(op_type, inputs, attributes, data):
    file = model_of(op_type, inputs, attributes, data, kind_of(op_type, inputs))
    loaded = burnish.load(file)
    left = {node.op_type for node in loaded.graph if node.domain or node.op_type.startswith("QLinear")}
    assert left == set()
    feeds = {f"input{index}": np.asarray(inputs[index]) for index in data}
    expected, actual = (onnxruntime_outputs(model, feeds)["y"] for model in (file, loaded))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.dtype == np.float32:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    else:  # A sum of floating-point numbers may round to the integer beside.
        assert np.abs(actual.astype(int) - expected).max() <= 1
        assert np.ptp(expected) > 20


def test_a_mean_of_integers() -> None:
    """No processor's kernel has it."""
    x = unsigned(2, 3, 8)
    attributes = {"axes": [1], "keepdims": 0}
    file = model_of("com.microsoft.QLinearReduceMean", [x, *X, *at(0.01, 128)], attributes, [0], TensorProto.UINT8)
    mean = ((x - 120.0) * 0.05).mean(1)
    actual = onnxruntime_outputs(burnish.load(file), {"input0": x})["y"]
    assert np.abs(actual - np.clip(np.rint(mean / 0.01) + 128, 0, 255)).max() <= 1


MIXED = """<ir_version: 8, opset_import: ["": 13, "com.microsoft": 1]> mixed (float[N, 2, 6, 6] x) => (float[N, 3] y)
<float scale = {0.05}, uint8 zero = {128}, float w_scale = {0.003}, int8 w_zero = {0}, float c_scale = {0.07},
 float s_scale = {0.11}, float p_scale = {0.013}, float head_scale = {0.011}, float y_scale = {0.017}> {
    h = Conv (x, stem)
    q = QuantizeLinear (h, scale, zero)
    c = QLinearConv <pads = [1, 1, 1, 1]> (q, scale, zero, w, w_scale, w_zero, c_scale, zero, b)
    s = com.microsoft.QLinearAdd (q, scale, zero, c, c_scale, zero, s_scale, zero)
    p = com.microsoft.QLinearGlobalAveragePool (s, s_scale, zero, p_scale, zero)
    flat = Flatten (p)
    m = QLinearMatMul (flat, p_scale, zero, head, head_scale, w_zero, y_scale, zero)
    y = DequantizeLinear (m, y_scale, zero)
}"""


def mixed() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A network whose first layer is in floating-point numbers and all else in integers."""
    rng = np.random.default_rng(1)
    tensors = {
        "stem": rng.normal(size=(4, 2, 3, 3)).astype(np.float32) / 2,
        "w": rng.integers(-100, 100, (4, 4, 3, 3)).astype(np.int8),
        "b": rng.integers(-500, 500, 4).astype(np.int32),
        "head": rng.integers(-100, 100, (4, 3)).astype(np.int8),
    }
    model = onnx.parser.parse_model(MIXED)
    model.graph.initializer.extend([numpy_helper.from_array(array, name) for name, array in tensors.items()])
    return model, tensors


def in_pytorch(x: torch.Tensor, stem: torch.Tensor, tensors: dict[str, np.ndarray]) -> torch.Tensor:
    def rounded(y: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(y, scale, 128, 0, 255)

    w, b, head = (torch.tensor(tensors[name].astype(np.float32)) for name in ("w", "b", "head"))
    q = rounded(torch.nn.functional.conv2d(x, stem), 0.05)
    c = rounded(torch.nn.functional.conv2d(q, w * 0.003, b * 0.00015, padding=1), 0.07)
    p = rounded(rounded(q + c, 0.11).mean((2, 3)), 0.013)
    return rounded(p @ (head * 0.011), 0.017)


@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_layer_before_integers_trains_as_pytorchs(engine: str) -> None:
    model, tensors = mixed()
    rng = np.random.default_rng(2)
    x, targets = rng.normal(size=(5, 2, 6, 6)).astype(np.float32), rng.normal(size=(5, 3)).astype(np.float32)
    with pytest.warns(burnish.errors.UntrainedWeightsWarning, match=r"'w', 'head': integers, as the model is quantized"):
        program = burnish.compile(model, loss="mean_squared_error", optimizer="sgd:lr=0.1")
    session = burnish.Session(program, engine=engine)
    stem = torch.tensor(tensors["stem"], requires_grad=True)
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(in_pytorch(torch.tensor(x), stem, tensors), torch.tensor(targets))
        (gradient,) = torch.autograd.grad(loss, stem)
        assert gradient.abs().max() > 1e-3
        assert session.step({"x": x, "targets": targets})["loss"] == pytest.approx(loss.item(), rel=1e-5)
        with torch.no_grad():
            stem -= 0.1 * gradient
        np.testing.assert_allclose(session.state()["param/stem"], stem.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_scales_that_no_standard_operator_takes_stay() -> None:
    scale = np.full((1, 2, 1), 0.05, np.float32)
    inputs = [unsigned(2, 2, 5), scale, np.full((1, 2, 1), 120, np.uint8), unsigned(2, 5, 4), *X, *Y]
    loaded = burnish.load(model_of("QLinearMatMul", inputs, {}, [0], TensorProto.UINT8))
    assert [node.op_type for node in loaded.graph] == ["QLinearMatMul"]


def test_a_node_without_what_it_needs_is_named() -> None:
    with pytest.raises(ModelError, match=r"com\.microsoft\.QLinearSigmoid 'node'.* lacks an input or an attribute"):
        burnish.load(model_of("com.microsoft.QLinearSigmoid", [ROWS, *X], {}, [0], TensorProto.UINT8))


@pytest.mark.parametrize("by_gate", [False, True])
def test_a_recurrent_layer_of_integers(by_gate: bool) -> None:
    """The kernel rounds what it reads too, to one part in 255 of its range."""
    scale = np.full((1, 16) if by_gate else (1,), 0.02, np.float32)
    x, weights = RNG.normal(size=(5, 2, 3)).astype(np.float32), (signed(1, 3, 16), signed(1, 4, 16))
    bias, zero = RNG.normal(size=(1, 32)).astype(np.float32), np.zeros(scale.shape, np.int8)
    inputs = [x, *weights, bias, None, None, None, None, scale, zero, scale, zero]
    file = model_of("com.microsoft.DynamicQuantizeLSTM", inputs, {"hidden_size": 4}, [0], TensorProto.FLOAT)
    expected, actual = (onnxruntime_outputs(model, {"input0": x})["y"] for model in (file, burnish.load(file)))
    np.testing.assert_allclose(actual, expected, atol=0.02)
    assert np.ptp(expected) > 0.5
    weights = burnish.importer.classify_initializers(burnish.load(file))
    assert [name for name, kind in weights.items() if kind == "weight"] == ["input3"]


def test_embeddings_in_integers() -> None:
    words, segments = (RNG.integers(0, count, (2, 4)).astype(np.int32) for count in (9, 2))
    tables = [unsigned(9, 8), unsigned(6, 8), unsigned(2, 8), unsigned(8), unsigned(8)]
    scales = [np.float32(scale) for scale in (0.02, 0.03, 0.01, 0.02, 0.01)]
    zeros = [np.uint8(zero) for zero in (128, 120, 130, 100, 128)]
    numbers = [(table - float(zero)) * scale for table, scale, zero in zip(tables, scales, zeros, strict=True)]
    file = model_of(
        "com.microsoft.QEmbedLayerNormalization", [words, segments, *tables, None, *scales, *zeros], {}, [0, 1], TensorProto.FLOAT
    )
    total = torch.tensor(numbers[0][words] + numbers[1][:4] + numbers[2][segments])
    expected = torch.nn.functional.layer_norm(total, (8,), *map(torch.tensor, numbers[3:]), 1e-12)
    actual = onnxruntime_outputs(burnish.load(file), {"input0": words, "input1": segments})["y"]
    np.testing.assert_allclose(actual, expected.numpy(), rtol=2e-5, atol=2e-5)
