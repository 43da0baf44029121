"""MaxUnpool: where its elements go is the same on every engine, and so is what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from burnish.engines.reference import ReferenceEngine
from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ModelError
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

ENGINES = {"reference": ReferenceEngine().run, "torch": lambda model, feeds: TorchEngine().load(model)(feeds)}
WINDOW = {"kernel_shape": [2, 2], "strides": [2, 2]}
ODD = np.random.default_rng(0).permutation(150).reshape(2, 3, 5, 5).astype(np.float32) / 10


def build(nodes: list[onnx.NodeProto], shape: tuple[int | str, ...], **constants: np.ndarray) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def check(model: onnx.ModelProto, x: np.ndarray, expected: np.ndarray, expected_gradient: np.ndarray, cotangent: np.ndarray):
    graph = burnish.grad(model, wrt="x", of="y")
    for run in (onnxruntime_outputs, *ENGINES.values()):
        outputs = run(graph, {"x": x, "cotangent:y": cotangent})
        np.testing.assert_array_equal(outputs["y"], expected)
        np.testing.assert_array_equal(outputs["grad:x"], expected_gradient)


@pytest.mark.parametrize(("opset", "size"), [(9, 4), (11, 5), (22, 5)])
def test_indices_from_outside_count_positions_of_the_size_that_the_attributes_give(opset: int, size: int) -> None:
    """As in the standard's own case, test_maxunpool_export_with_output_shape."""
    x, indices = np.array([[[[5, 6], [7, 8]]]], np.float32), np.array([[[[5, 7], [13, 15]]]])
    cotangent = np.random.default_rng(1).normal(size=(1, 1, size, size)).astype(np.float32)
    expected = np.zeros_like(cotangent)
    expected[..., 1:4:2, 1:4:2] = x
    unpool = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], **WINDOW)
    model = build([unpool], (1, 1, 2, 2), i=indices, s=np.array([1, 1, size, size]))
    model.opset_import[0].version = opset
    check(model, x, expected, cotangent[..., 1:4:2, 1:4:2], cotangent)


@pytest.mark.parametrize("shape", [(2, 3, 5, 5), ("n", 3, 5, 5), ("n", 3, "h", "w")])
@pytest.mark.parametrize("target", [5, 7])
def test_maxima_go_back_to_where_they_were(shape: tuple[int | str, ...], target: int) -> None:
    """Indices of a MaxPool over odd sizes count positions of what it read, not of the size that the attributes give."""
    pool = helper.make_node("MaxPool", ["x"], ["p", "i"], **WINDOW)
    if target == 5:
        sizes, constants = [helper.make_node("Shape", ["x"], ["s"])], {}
    else:
        sizes, constants = [], {"s": np.array([2, 3, target, target])}
    model = build([pool, *sizes, helper.make_node("MaxUnpool", ["p", "i", "s"], ["y"], **WINDOW)], shape, **constants)
    blocks = ODD[..., :4, :4].reshape(2, 3, 2, 2, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(2, 3, 4, 4)
    kept = np.isin(ODD, blocks.max(-1))
    padding = [(0, 0), (0, 0), (0, target - 5), (0, target - 5)]
    cotangent = np.random.default_rng(1).normal(size=(2, 3, target, target)).astype(np.float32)
    check(model, ODD, np.pad(np.where(kept, ODD, 0), padding), np.where(kept, cotangent[..., :5, :5], 0), cotangent)


def test_an_output_shape_that_says_nothing_new_is_left_out() -> None:
    indices = np.array([[[[5, 7], [13, 15]]]])
    node = helper.make_node("MaxUnpool", ["x", "i", "s"], ["y"], **WINDOW)
    model = load(build([node], (1, 1, 2, 2), i=indices, s=np.array([1, 1, 4, 4])))
    assert [(node.op_type, len(node.inputs)) for node in model.graph if node.op_type != "Constant"] == [("MaxUnpool", 2)]


def test_of_elements_that_share_a_place_the_last_has_the_gradient() -> None:
    indices = np.array([[[[5, 7], [7, 15]]]])
    x, cotangent = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2), np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    expected = np.zeros(16, np.float32)
    expected[[5, 7, 15]] = 1, 3, 4
    gradient = np.array([[[[5, 0], [7, 15]]]], np.float32)
    model = build([helper.make_node("MaxUnpool", ["x", "i"], ["y"], **WINDOW)], (1, 1, 2, 2), i=indices)
    check(model, x, expected.reshape(1, 1, 4, 4), gradient, cotangent)


ERRORS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "no_shape": (
        {},
        ["p", "i"],
        r"has no output_shape, so that its output is 4×4, and its indices count .* 'x', which is 5×5",
    ),
    "too_small": ({}, ["p", "i", "s"], r"has output_shape 4×4, and its indices count positions of 5×5, which does not fit"),
    "by_column": ({"storage_order": 1}, ["p", "i", "s"], r"the indices of MaxPool 'pool' .*storage_order=1, and takes row-major"),
}


@pytest.mark.parametrize(("attributes", "operands", "match"), ERRORS.values(), ids=list(ERRORS))
def test_what_has_no_meaning_is_a_named_error(attributes: dict[str, Any], operands: list[str], match: str) -> None:
    pool = helper.make_node("MaxPool", ["x"], ["p", "i"], name="pool", **WINDOW, **attributes)
    unpool = helper.make_node("MaxUnpool", operands, ["y"], name="unpool", **WINDOW)
    with pytest.raises(ModelError, match=rf"MaxUnpool 'unpool' .*{match}"):
        load(build([pool, unpool], (2, 3, 5, 5), s=np.array([2, 3, 4, 4])))
