"""Padding of convolutions and pools as explicit pads, and as data."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.errors import ModelError
from burnish.importer import load
from burnish.importer.padding import write_pads
from oracles.onnxruntime_outputs import onnxruntime_outputs

LINE = np.arange(1, 8, dtype=np.float32).reshape(1, 1, 7)


def build(op_type: str, shape: tuple[int | str, ...], weight: np.ndarray | None = None, **attributes: Any) -> onnx.ModelProto:
    operands = ["x"] if weight is None else ["x", "w"]
    graph = helper.make_graph(
        [helper.make_node(op_type, operands, ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [] if weight is None else [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def attributes_of(model: ir.Model) -> dict[str, Any]:
    (node,) = [node for node in model.graph if node.op_type != "Constant"]
    return {name: list(attribute.value) if name != "auto_pad" else attribute.value for name, attribute in node.attributes.items()}


CASES: dict[str, tuple[str, tuple[int | str, ...], tuple[int, ...] | None, dict[str, Any], dict[str, list[int]]]] = {
    "valid": ("Conv", ("n", 1, "h"), (1, 1, 3), {"auto_pad": "VALID"}, {"pads": [0, 0]}),
    "stride_one": ("Conv", ("n", 1, "h"), (1, 1, 4), {"auto_pad": "SAME_UPPER"}, {"pads": [1, 2]}),
    "lower": ("Conv", ("n", 1, "h"), (1, 1, 4), {"auto_pad": "SAME_LOWER"}, {"pads": [2, 1]}),
    "sized": ("Conv", ("n", 1, 7), (1, 1, 2), {"auto_pad": "SAME_LOWER", "strides": [2]}, {"strides": [2], "pads": [1, 0]}),
    "transposed": (
        "ConvTranspose",
        ("n", 1, "h"),
        (1, 1, 4),
        {"auto_pad": "SAME_UPPER", "strides": [2], "output_padding": [1]},
        {"strides": [2], "output_padding": [1], "pads": [1, 2]},
    ),
    "not_reached": (
        "ConvTranspose",
        ("n", 1, "h"),
        (1, 1, 1),
        {"auto_pad": "SAME_UPPER", "strides": [2]},
        {"strides": [2], "pads": [0, 0], "output_padding": [1]},
    ),
    "output_shape": (
        "ConvTranspose",
        ("n", 1, 4),
        (1, 1, 3),
        {"output_shape": [8], "strides": [2]},
        {"strides": [2], "pads": [1, 0]},
    ),
}


@pytest.mark.parametrize(("op_type", "shape", "weight", "given", "expected"), CASES.values(), ids=list(CASES))
def test_pads_are_written(
    op_type: str,
    shape: tuple[int | str, ...],
    weight: tuple[int, ...] | None,
    given: dict[str, Any],
    expected: dict[str, list[int]],
) -> None:
    array = None if weight is None else np.ones(weight, np.float32)
    assert attributes_of(load(build(op_type, shape, array, **given))) == expected


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_what_changes_with_the_input_stays(op_type: str) -> None:
    given = {"auto_pad": "SAME_UPPER"} if op_type == "Conv" else {"output_shape": [8]}
    model = load(build(op_type, ("n", 1, "h"), np.ones((1, 1, 3), np.float32), strides=[2], **given))
    assert attributes_of(model) == {**given, "strides": [2]}


@pytest.mark.parametrize("op_type", ["MaxPool", "LpPool"])
def test_dilated_windows_keep_the_size(op_type: str) -> None:
    """ONNX Runtime takes no notice of the dilations where it finds the pads by itself, and gives fewer elements."""
    attributes = {"kernel_shape": [2], "dilations": [2], "auto_pad": "SAME_LOWER"} | ({"p": 1} if op_type == "LpPool" else {})
    expected = {"MaxPool": [2, 3, 4, 5, 6, 7, 6], "LpPool": [2, 4, 6, 8, 10, 12, 6]}[op_type]
    (found,) = onnxruntime_outputs(load(build(op_type, (1, 1, 7), **attributes)), {"x": LINE}).values()
    np.testing.assert_array_equal(found.reshape(-1), expected)


def test_a_rounded_up_size_is_that_of_the_data_divided() -> None:
    attributes = {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER", "ceil_mode": 1}
    model = load(build("MaxPool", (1, 1, 7), **attributes))
    assert "ceil_mode" not in attributes_of(model)
    (found,) = onnxruntime_outputs(model, {"x": LINE}).values()
    np.testing.assert_array_equal(found.reshape(-1), [1, 4, 7])


@pytest.mark.parametrize(
    ("op_type", "attributes", "named"),
    [
        ("MaxPool", {"kernel_shape": [3, 3], "strides": [2]}, "1 numbers in 'strides', and a kernel of 2 axes"),
        ("MaxPool", {"kernel_shape": [3, 3], "dilations": [1, 1, 1]}, "3 numbers in 'dilations'"),
        ("ConvTranspose", {"output_padding": [1]}, "1 numbers in 'output_padding'"),
        ("ConvTranspose", {"output_shape": [8]}, "1 numbers in 'output_shape'"),
    ],
)
def test_numbers_that_are_not_one_for_each_axis(op_type: str, attributes: dict[str, Any], named: str) -> None:
    weight = np.ones((1, 1, 3, 3), np.float32) if op_type == "ConvTranspose" else None
    source = build(op_type, ("n", 1, 8, 8), weight, auto_pad="SAME_UPPER", **attributes)
    with pytest.raises(ModelError, match=rf"{op_type} .*{named}"):
        write_pads(ir.from_proto(source))


def pooling(shape: tuple[int | str, ...], opset: int = 17, **attributes) -> onnx.ModelProto:
    pool = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], count_include_pad=1, ceil_mode=1, **attributes)
    graph = helper.make_graph(
        [pool],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def operators(model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("opset", [10, 17, 22])
@pytest.mark.parametrize(("shape", "pads"), [((2, 2, 6, 8), [0] * 4), (("n", 2, "h", "w"), [0] * 4), (("n", 2, 6, 8), [1] * 4)])
def test_the_runtime_counts_nothing_and_the_averages_are_pytorchs(shape, pads: list[int], opset: int) -> None:
    model = burnish.load(pooling(shape, opset, strides=[2, 2], pads=pads))
    (pool,) = (node for node in model.graph if node.op_type == "AveragePool")
    assert "count_include_pad" not in pool.attributes
    assert ("Pad" in operators(model)) == any(pads)

    x = np.random.default_rng(0).normal(size=(2, 2, 6, 8)).astype(np.float32)
    expected = torch.nn.AvgPool2d(3, 2, pads[0], ceil_mode=True)(torch.from_numpy(x))
    np.testing.assert_allclose(onnxruntime_outputs(model, {"x": x})["y"], expected, rtol=1e-6, atol=1e-7)


def test_windows_that_cannot_be_counted_stay() -> None:
    model = burnish.load(pooling((2, 2, "h", "w"), strides=[2, 2], pads=[1, 1, 1, 1]))
    assert operators(model) == ["AveragePool"]
