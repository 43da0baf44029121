"""Operators between transpositions: ONNX Runtime's transpose optimizer moves these across them, and has to rewrite their axes.

A release that rewrites one of them wrong computes something else without a word; it is found here, and belongs to
``optimizations.is_transposed_wrong`` then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.engines.onnxruntime import OnnxRuntimeEngine, OptimizationWarning, optimizations
from oracles.combinations import spread

GENERATOR = np.random.default_rng(0)
RANK = 3
EXTENTS = ((2, 3, 4), (3, 3, 3))
"""Extents that tell axes apart, and equal ones, with which a wrong axis is no error."""


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def uniform(*shape: int) -> np.ndarray:
    return GENERATOR.uniform(0.5, 2, shape).astype(np.float32)


OPERATORS: dict[str, tuple[str, dict[str, Any], Sequence[np.ndarray]]] = {
    "softmax": ("Softmax", {"axis": 1}, ()),
    "softmax of the last axis": ("Softmax", {"axis": -1}, ()),
    "argmax": ("ArgMax", {"axis": -2, "keepdims": 1}, ()),
    "argmax that drops its axis": ("ArgMax", {"axis": 0, "keepdims": 0}, ()),
    "sum": ("ReduceSum", {"keepdims": 1}, (integers(-1, 0),)),
    "sum that drops axes": ("ReduceSum", {"keepdims": 0}, (integers(1),)),
    "sum of all axes": ("ReduceSum", {"keepdims": 0}, ()),
    "sum of no axes": ("ReduceSum", {"noop_with_empty_axes": 1}, (integers(),)),
    "mean": ("ReduceMean", {"keepdims": 0}, (integers(0, -1),)),
    "slice": ("Slice", {}, (integers(1, 0), integers(9, 2), integers(-1, 0))),
    "slice without axes": ("Slice", {}, (integers(1, 0), integers(9, 2))),
    "slice backwards": ("Slice", {}, (integers(-1), integers(-9), integers(1), integers(-1))),
    "tile": ("Tile", {}, (integers(1, 2, 3),)),
    "expand": ("Expand", {}, (integers(2, 1, 1, 1),)),
    "unsqueeze": ("Unsqueeze", {}, (integers(0, -2),)),
    "gather": ("Gather", {"axis": 1}, (integers(1, 0, 1),)),
    "gather of one": ("Gather", {"axis": -2}, (np.array(1, np.int64),)),
    "gather of a matrix": ("Gather", {"axis": 2}, (np.array([[0, 1], [1, 0]], np.int64),)),
    "pad": ("Pad", {}, (integers(1, 0, 2, 0, 1, 0),)),
    "pad of axes": ("Pad", {}, (integers(1, 2), np.float32(0.5), integers(-1))),
    "pad of axes in another order": ("Pad", {}, (integers(1, 0, 2, 0, 1, 0), np.float32(0.5), integers(2, 0, 1))),
    "cumulative sum": ("CumSum", {"exclusive": 1}, (np.array(-2, np.int64),)),
    "flatten": ("Flatten", {"axis": 2}, ()),
    "triangle": ("Trilu", {"upper": 0}, ()),
    "addition of a vector": ("Add", {}, (uniform(1),)),
    "addition of another rank": ("Add", {}, (uniform(2, 1, 1, 1),)),
    "product with a scalar": ("Mul", {}, (uniform(),)),
    "slope": ("PRelu", {}, (uniform(1, 1),)),
    "limits": ("Clip", {}, (np.float32(-0.5), np.float32(0.5))),
    "split": ("Split", {"axis": -1, "num_outputs": 1}, ()),
    "pooling": ("MaxPool", {"kernel_shape": [2]}, ()),
    "mean of places": ("GlobalAveragePool", {}, ()),
    "einsum": ("Einsum", {"equation": "abc->cab"}, ()),
    "nearest": ("Resize", {"mode": "nearest", "axes": [2, 0]}, (np.float32([]), np.float32([2, 1]))),
}


def sandwich(name: str, order: Sequence[int], extents: Sequence[int]) -> onnx.ModelProto:
    """A model of one operator that reads a transposition, and another transposition of what it gives."""
    operator, attributes, arrays = OPERATORS[name]
    initializers = [numpy_helper.from_array(np.asarray(array), f"operand{index}") for index, array in enumerate(arrays)]
    middle = helper.make_node(operator, ["turned", *(tensor.name for tensor in initializers)], ["y"], **attributes)
    nodes = [helper.make_node("Transpose", ["x"], ["turned"], perm=order), middle]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, extents)
    opsets = [helper.make_opsetid("", 21)]

    def model(output: onnx.ValueInfoProto) -> onnx.ModelProto:
        return helper.make_model(helper.make_graph(nodes, "g", [x], [output], initializers), opset_imports=opsets, ir_version=10)

    inferred = onnx.shape_inference.infer_shapes(model(helper.make_empty_tensor_value_info("y")), data_prop=True)
    kind = inferred.graph.output[0].type.tensor_type
    rank = len(kind.shape.dim)
    back = (
        helper.make_node("Transpose", ["y"], ["z"], perm=[*range(1, rank), 0]) if rank else helper.make_node("Abs", ["y"], ["z"])
    )
    nodes.append(back)
    return model(helper.make_tensor_value_info("z", kind.elem_type, None))


@pytest.mark.slow
@spread("name", OPERATORS, test_all=12)
def test_an_operator_between_transpositions_means_the_same(name: str) -> None:
    for extents in EXTENTS:
        x = GENERATOR.normal(size=extents).astype(np.float32)
        for order in permutations(range(RANK)):
            model = ir.from_proto(sandwich(name, order, extents))
            expected = OnnxRuntimeEngine("none").run(model, {"x": x})["z"]
            for level in ("basic", "all"):
                found = OnnxRuntimeEngine(level).run(model, {"x": x})["z"]
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=f"{order} {extents} {level}")


def test_the_padding_of_a_shifted_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the gradient of a Swin transformer, the least that ONNX Runtime (1.32) breaks: it picks amounts for all axes from those
    for one. Nothing is known of it here, as of what a later release may break: the engine finds out, says so once, and goes on.
    """
    monkeypatch.setattr(optimizations, "is_transposed_wrong", lambda model: False)
    model = sandwich("pad of axes", (0, 2, 1), EXTENTS[0])
    x = GENERATOR.normal(size=EXTENTS[0]).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with pytest.raises(Exception, match=r"running Gather node.*out of data bounds"):
        onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    expected = OnnxRuntimeEngine("none").run(ir.from_proto(model), {"x": x})["z"]
    run = OnnxRuntimeEngine().load(ir.from_proto(model))
    with pytest.warns(OptimizationWarning, match="without TransposeOptimizer") as warned:
        results = [run({"x": x})["z"] for _ in range(3)]
    assert len(warned) == 1
    for result in results:
        np.testing.assert_array_equal(result, expected)
