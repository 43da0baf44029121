"""Depthwise convolutions of large kernels over small images: products of matrices, with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.rewriting.multiply_depthwise_rows import multiply_depthwise_rows
from burnish.targets import TARGETS
from oracles.rewritten import rewritten


def convolution(
    x: str = "float[N, 6, 9, 7]", w: str = "float[6, 1, 5, 3]", attributes: str = "pads = [2, 1, 2, 1]", bias: str = ""
) -> ir.Model:
    dtype = x.partition("[")[0]
    inputs = f"{x} x, {w} w{f', {bias} b' if bias else ''}"
    node = f"y = Conv<group = 6, {attributes}>(x, w{', b' if bias else ''})"
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({dtype}[N, M, H, W] y) {{ {node} }}'
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("bias", ["", "float[6]"])
@pytest.mark.parametrize(
    ("kernel", "pads"), [("5, 3", "2, 1, 2, 1"), ("3, 5", "0, 2, 1, 0"), ("4, 4", "0, 0, 0, 0"), ("9, 7", "4, 3, 4, 3")]
)
def test_results_are_those_of_the_convolution_for_any_batch(kernel, pads, bias):
    rng = np.random.default_rng(0)
    model = convolution(w=f"float[6, 1, {kernel}]", attributes=f"pads = [{pads}]", bias=bias)
    multiplied = rewritten(multiply_depthwise_rows, model.clone())
    assert operators(multiplied).count("MatMul") == 2
    assert "Conv" not in operators(multiplied)
    onnx.checker.check_model(ir.to_proto(multiplied), full_check=True)
    taps = tuple(map(int, kernel.split(",")))
    for batch in (1, 3):
        arrays = {
            "x": rng.standard_normal((batch, 6, 9, 7)),
            "w": rng.standard_normal((6, 1, *taps)),
            "b": rng.standard_normal(6),
        }
        arrays = {name: array.astype(np.float32) for name, array in arrays.items() if name != "b" or bias}
        engine = OnnxRuntimeEngine(kernels=False)
        expected, given = (engine.run(each, arrays)["y"] for each in (model, multiplied))
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": "strides = [2, 1]"},
        {"attributes": "dilations = [1, 2]"},
        {"attributes": 'auto_pad = "SAME_UPPER"'},
        {"w": "float[12, 1, 5, 3]"},
        {"x": "float[N, 12, 9, 7]", "w": "float[6, 2, 5, 3]"},
        {"x": "double[N, 6, 9, 7]", "w": "double[6, 1, 5, 3]"},
        {"x": "float[N, 6, H, 7]"},
        {"x": "float[N, 6, 112, 112]", "w": "float[6, 1, 3, 3]", "attributes": "pads = [1, 1, 1, 1]"},
        {"x": "float[N, 6, 56, 56]", "w": "float[6, 1, 7, 7]", "attributes": "pads = [3, 3, 3, 3]"},
    ],
)
def test_others_and_wide_images_stay_convolutions(changes):
    assert operators(rewritten(multiply_depthwise_rows, convolution(**changes))) == ["Conv"]


def test_a_constant_weight_is_left_to_the_kernel_that_onnxruntime_has_for_it():
    proto = ir.to_proto(convolution())
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 1, 5, 3), np.float32), "w"))
    del proto.graph.input[1]
    assert operators(rewritten(multiply_depthwise_rows, ir.from_proto(proto))) == ["Conv"]


@pytest.mark.slow
def test_a_program_multiplies_in_both_directions_where_its_runtime_has_no_kernels(tmp_path):
    """And its export keeps the convolutions, for which runtimes have kernels where weights are constants."""
    rng = np.random.default_rng(0)
    attributes, shape = "group = 4, pads = [3, 3, 3, 3]", "float[N, 4, 7, 7]"
    nodes = f"h = Conv<{attributes}>(x, first) y = Conv<{attributes}>(h, second)"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g ({shape} x) => ({shape} y) {{ {nodes} }}')
    for name in ("first", "second"):
        weight = rng.standard_normal((4, 1, 7, 7)).astype(np.float32) / 7
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))

    def programs(target: str) -> burnish.Program:
        return burnish.compile(proto, loss="mse", optimizer=burnish.optim.sgd(lr=0.1), target=TARGETS[target])

    program, other = programs("onnxruntime"), programs("webgpu")
    assert operators(program.step).count("Conv") == 0
    assert operators(other.step).count("Conv") >= 3
    batch = {"x": rng.standard_normal((2, 4, 7, 7)).astype(np.float32), "targets": np.zeros((2, 4, 7, 7), np.float32)}
    with burnish.Session(program, engine=OnnxRuntimeEngine(kernels=False)) as first, burnish.Session(other) as second:
        assert [first.step(batch)["loss"] for _ in range(2)] == pytest.approx(
            [second.step(batch)["loss"] for _ in range(2)], 1e-5
        )
        exported = ir.load(first.export(tmp_path / "exported.onnx"))
        (predicted,) = first.predict(batch).values()
    assert operators(exported) == ["Conv", "Conv"]
    (computed,) = OnnxRuntimeEngine(kernels=False).run(exported, {"x": batch["x"]}).values()
    np.testing.assert_allclose(predicted, computed, rtol=1e-5, atol=1e-5)
