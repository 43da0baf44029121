"""Adapters beside quantized weights, as quantizers write them: the numbers of every engine, names, and what is merged."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish import surgery
from burnish.adapters.graph import read_adapters
from burnish.errors import ConfigurationError
from burnish.graph.constants import NARROW_INTEGERS
from oracles.onnxruntime_outputs import onnxruntime_outputs

INPUTS, OUTPUTS, BLOCK = 32, 6, 16
RUNTIME = "com.microsoft"
BATCH = {
    "x": np.random.default_rng(1).normal(size=(5, INPUTS)).astype(np.float32),
    "labels": np.arange(5) % OUTPUTS,
}


def four_bits(kind: str) -> onnx.ModelProto:
    """A linear layer of the module ``up``, whose weight has no name of its own, as PyTorch's older exporter leaves it."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.02, 0.05, (INPUTS // BLOCK, OUTPUTS)).astype(np.float32)
    nodes, arrays = [], {"up.bias": rng.normal(size=OUTPUTS).astype(np.float32)}
    sizes: dict[str, Any] = {"K": INPUTS, "N": OUTPUTS, "block_size": BLOCK}
    if kind == "DequantizeLinear":
        integers = rng.integers(-8, 8, (INPUTS, OUTPUTS)).astype(ml_dtypes.int4)
        arrays |= {"onnx::MatMul_9_Q4": integers, "scales": scales}
        nodes.append(helper.make_node(kind, ["onnx::MatMul_9_Q4", "scales"], ["whole"], "/up/DQ", axis=0, block_size=BLOCK))
        nodes.append(helper.make_node("MatMul", ["x", "whole"], ["product"], "/up/MatMul_Q4"))
    elif kind == "MatMulNBits":
        arrays |= {"onnx::MatMul_9_Q4": rng.integers(0, 256, (OUTPUTS, INPUTS // BLOCK, BLOCK // 2), np.uint8)}
        arrays |= {"scales": scales.T.copy()}
        read = ["x", "onnx::MatMul_9_Q4", "scales"]
        nodes.append(helper.make_node(kind, read, ["product"], "/up/MatMul_Q4", domain=RUNTIME, bits=4, **sizes))
    else:
        arrays |= {"onnx::MatMul_9_Q4": rng.integers(0, 256, INPUTS * OUTPUTS // 2, np.uint8), "scales": scales.T.ravel().copy()}
        read = ["x", "onnx::MatMul_9_Q4", "scales"]
        nodes.append(helper.make_node(kind, read, ["product"], "/up/MatMul_Q4", domain=RUNTIME, quant_type=1, **sizes))
    nodes.append(helper.make_node("Add", ["up.bias", "product"], ["logits"], "/up/Add"))
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", OUTPUTS])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(RUNTIME, 1)], ir_version=10)


@pytest.mark.parametrize("kind", ["DequantizeLinear", "MatMulNBits", "MatMulBnb4"])
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_the_base_is_computed_in_float32_and_merged(kind, engine, tmp_path):
    """ONNX Runtime by itself rounds what is multiplied by such weights behind a DequantizeLinear to eight bits."""
    model = four_bits(kind)
    adapted = surgery.lora(model, "up", rank=2)
    assert [adapter.layer for adapter in read_adapters(adapted.metadata_props).adapters] == ["up"]
    session = burnish.Session(burnish.compile(adapted, optimizer="sgd:lr=0.5"), engine, threads=1)
    expected = onnxruntime_outputs(model, {"x": BATCH["x"]})["logits"].astype(np.float64)
    np.testing.assert_allclose(session.predict({"x": BATCH["x"]})["logits"], expected, rtol=1e-5, atol=1e-5)
    chosen = expected[np.arange(5), BATCH["labels"]]
    loss = np.mean(np.log(np.exp(expected).sum(axis=1)) - chosen)
    assert session.step(BATCH)["loss"] == pytest.approx(loss, rel=2e-6)
    session.step(BATCH)
    path = session.export(tmp_path / "merged.onnx")
    merged = onnxruntime.InferenceSession(path).run(None, {"x": BATCH["x"]})[0]
    np.testing.assert_allclose(merged, session.predict({"x": BATCH["x"]})["logits"], rtol=1e-5, atol=1e-5)
    assert [tensor.name for tensor in onnx.load(path).graph.initializer] == ["up.bias", "up.merged_weight"]


BIASES = {
    "of integers": """<int32[6] b = {400, -300, 200, -100, 50, 0}, float scale = {0.01}> {
        w = DequantizeLinear (w8, scales)
        bias = DequantizeLinear (b, scale)
        y = Gemm <alpha = 0.5, beta = 2.0> (x, w, bias)
    }""",
    "of the input": """{
        w = DequantizeLinear (w8, scales)
        axis = Constant <value_ints = [1]> ()
        bias = ReduceMean (x, axis)
        y = Gemm (x, w, bias)
    }""",
}


@pytest.mark.parametrize("kind", BIASES)
def test_a_scale_goes_into_a_bias_that_is_computed(kind, tmp_path):
    """As that of a model in QDQ form, whose biases are 32-bit integers."""
    head = '<ir_version: 8, opset_import: ["": 18]> g (float[N, 4] x) => (float[N, 6] y) '
    model = onnx.parser.parse_model(head + BIASES[kind])
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (4, 6), np.int8)
    model.graph.initializer.extend([numpy_helper.from_array(weight, "w8"), numpy_helper.from_array(np.float32(0.02), "scales")])
    session = burnish.Session(burnish.compile(surgery.lora(model, "w8", variant="ia3"), loss="mse", optimizer="sgd:lr=0.5"))
    x, y = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)
    session.step({"x": x, "targets": y})
    path = session.export(tmp_path / "merged.onnx")
    merged = onnxruntime.InferenceSession(path).run(None, {"x": x})[0]
    np.testing.assert_allclose(merged, session.predict({"x": x})["y"], rtol=1e-5, atol=1e-5)
    assert not np.allclose(merged, onnxruntime_outputs(model, {"x": x})["y"], atol=1e-2)


def dynamically_quantized(path, per_channel: bool, convolution: bool = False):
    """A network whose products onnxruntime's quantize_dynamic made products of integers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    generator = np.random.default_rng(0)
    shapes = {"first.weight": (8, 16), "second.weight": (16, 4)}
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["h"], "/first/MatMul"),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMul", ["t", "second.weight"], ["logits"], "/second/MatMul"),
    ]
    extents: list = [8]
    if convolution:
        shapes, extents = {"filter.weight": (4, 3, 3, 3)}, [3, 6, 6]
        nodes = [
            helper.make_node("Conv", ["x", "filter.weight"], ["y"], "/filter/Conv", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            helper.make_node("GlobalAveragePool", ["y"], ["p"]),
            helper.make_node("Flatten", ["p"], ["logits"]),
        ]
    graph = helper.make_graph(
        nodes,
        "plain",
        [helper.make_tensor_value_info("x", 1, ["n", *extents])],
        [helper.make_tensor_value_info("logits", 1, ["n", 4])],
        [onnx.numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name) for name, shape in shapes.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path / "plain.onnx")
    # Kernels of x86 processors without VNNI saturate where weights have all 8 bits.
    quantize_dynamic(
        path / "plain.onnx", path / "q.onnx", weight_type=QuantType.QInt8, per_channel=per_channel, reduce_range=True
    )
    x = generator.normal(size=(16, *extents)).astype(np.float32)
    return path / "q.onnx", {"x": x, "labels": generator.integers(0, 4, 16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_channel", "convolution"),
    [(False, False), (True, False), (False, True)],
    ids=["one scale", "each column", "ConvInteger"],
)
def test_adapters_stand_beside_products_of_integers(per_channel, convolution, tmp_path):
    """Files of ``quantize_dynamic``: DynamicQuantizeLinear, MatMulInteger, and a product with the scales of both factors."""
    path, feeds = dynamically_quantized(tmp_path, per_channel, convolution)
    before = onnxruntime.InferenceSession(path).run(None, {"x": feeds["x"]})[0]
    model = surgery.lora(path, rank=2)
    session = burnish.Session(burnish.compile(model, optimizer="adamw:lr=0.05"), threads=1)
    layers = [adapter.layer for adapter in read_adapters(model.metadata_props).adapters]
    assert layers == (["filter"] if convolution else ["first", "second"])
    step = np.abs(before).max() / 100
    np.testing.assert_allclose(session.predict({"x": feeds["x"]})["logits"], before, atol=step)
    losses = [float(session.step(feeds)["loss"]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    weights = [value for value in model.graph.initializers.values() if value.dtype in NARROW_INTEGERS and len(value.shape)]
    assert len([value for value in weights if len(value.shape) > 1]) == len(layers)
    merged = session.export(tmp_path / "merged.onnx")
    tuned = onnxruntime.InferenceSession(merged).run(None, {"x": feeds["x"]})[0]
    np.testing.assert_allclose(tuned, session.predict({"x": feeds["x"]})["logits"], atol=step)
    assert not np.allclose(tuned, before, atol=2 * step)


def test_a_product_of_integers_without_an_adapter_keeps_its_integers(tmp_path):
    path, _ = dynamically_quantized(tmp_path, per_channel=False)
    model = surgery.lora(path, "second", rank=2)
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("MatMulInteger") == 1
    assert [adapter.layer for adapter in read_adapters(model.metadata_props).adapters] == ["second"]


def test_integers_that_nothing_scales_are_refused_by_name():
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"], "product")],
        "integers",
        [helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["n", 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.INT32, ["n", 3])],
        [onnx.numpy_helper.from_array(np.ones((4, 3), np.int8), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    with pytest.raises(ConfigurationError, match=r"MatMulInteger 'product'.*multiplies integers.*scales"):
        surgery.lora(model, "product")
