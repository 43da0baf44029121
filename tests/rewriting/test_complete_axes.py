"""Pad and Resize that name axes, given for all axes: the same results, and nothing left to name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Builder
from burnish.graph.names import separate_names
from burnish.rewriting.complete_axes import complete_axes, names_axes
from oracles.rewritten import rewritten

BODY_INPUTS = [("x", ir.DataType.DOUBLE), ("condition", ir.DataType.BOOL)]

X = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)


def model_of(
    nodes: list[onnx.NodeProto], arrays: dict[str, Any], inputs: dict[str, Any], shape: Any = X.shape
) -> onnx.ModelProto:
    """A model from ``x`` and other inputs to ``y``; ``arrays`` are its initializers."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            *(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), [len(array)])
                for name, array in inputs.items()
            ),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)


def completed(model: onnx.ModelProto, **inputs: np.ndarray) -> tuple[ir.Model, np.ndarray]:
    """The model behind the pass, checked to compute the same, and what it computes."""
    engine = OnnxRuntimeEngine("none")
    before = engine.run(ir.from_proto(model), {"x": X, **inputs})["y"]
    changed = rewritten(complete_axes, ir.from_proto(model))
    after = engine.run(changed, {"x": X, **inputs})["y"]
    np.testing.assert_array_equal(after, before)
    return changed, after


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph.all_nodes() if node.op_type != "Constant"]


PAD = helper.make_node("Pad", ["x", "amounts", "", "axes"], ["y"])
AXES, AMOUNTS = np.array([-1, 1]), np.array([1, -1, 2, 3])


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize(
    ("axes", "amounts"),
    [([-1, 1], [1, 1, 2, 0]), ([3, 0, 2, 1], [1, 0, 2, 0, 2, 1, 0, 1]), ([2], [2, -1]), ([], [])],
)
def test_constant_amounts_become_a_constant(axes, amounts, mode):
    node = helper.make_node("Pad", ["x", "amounts", "value", "axes"], ["y"], mode=mode)
    arrays = {"amounts": np.array(amounts, np.int64), "axes": np.array(axes, np.int64), "value": np.float32(7)}
    model, _ = completed(model_of([node], arrays, {}))
    assert operators(model) == ["Pad"]
    (pad,) = (node for node in model.graph if node.op_type == "Pad")
    assert not names_axes(pad)
    assert len(pad.inputs) == 3


def test_amounts_that_are_computed_are_picked():
    changed, y = completed(model_of([PAD], {"axes": AXES}, {"amounts": AMOUNTS}, ["batch", 3, 4, 5]), amounts=AMOUNTS)
    assert operators(changed) == ["Concat", "Gather", "Pad"]
    np.testing.assert_array_equal(y, np.pad(X[:, 1:], [(0, 0), (0, 3), (0, 0), (1, 2)]))


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("shape", [["batch", 3, 4, 5], None], ids=["known rank", "unknown rank"])
def test_axes_that_are_computed_are_scattered_to(dtype, shape):
    axes = AXES.astype(dtype)
    model = model_of([PAD], {}, {"amounts": AMOUNTS, "axes": axes}, shape)
    changed, y = completed(model, amounts=AMOUNTS, axes=axes)
    assert operators(changed)[-2:] == ["ScatterElements", "Pad"]
    np.testing.assert_array_equal(y, np.pad(X[:, 1:], [(0, 0), (0, 3), (0, 0), (1, 2)]))


def test_constant_axes_of_an_unknown_rank_are_scattered_to():
    changed, _ = completed(model_of([PAD], {"axes": AXES, "amounts": AMOUNTS}, {}, None))
    assert operators(changed)[-2:] == ["ScatterElements", "Pad"]


def test_constants_are_named_apart_from_values_of_bodies():
    """What burnish emits into a body is named without a look at the graph around it, and the other way round."""
    inputs = [ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([])) for name, kind in BODY_INPUTS]
    graph = ir.Graph(inputs, [], nodes=[], name="g", opset_imports={"": 18})
    builder = Builder(graph)
    body = ir.Graph([], [], nodes=[], name="body", opset_imports={"": 18})
    inner = Builder(body)
    rows = builder.op("Unsqueeze", builder.tensor(inputs[0]), builder.integers([0, 1]))
    padded = builder.op("Pad", rows, builder.integers([1, 1]), None, builder.integers([1]))
    hidden = inner.tensor(padded.value)
    for _ in range(20):
        hidden = inner.op("Tanh", hidden)
    body.outputs.append(hidden.value)
    other = body.clone(allow_outer_scope_values=True)
    chosen = builder.op("If", builder.tensor(inputs[1]), then_branch=body, else_branch=other, like=padded)
    graph.outputs.append(chosen.value)
    separate_names(graph)
    complete_axes(model := ir.Model(graph, ir_version=10))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_padding_in_bodies_is_completed_too():
    branches = [
        helper.make_graph(
            [helper.make_node("Pad", ["x", "amounts", "", "axes"], [f"y{number}"], mode=mode)],
            f"branch{number}",
            [],
            [helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None)],
        )
        for number, mode in enumerate(["edge", "constant"])
    ]
    node = helper.make_node("If", ["condition"], ["y"], then_branch=branches[0], else_branch=branches[1])
    for condition in (True, False):
        arrays = {"axes": AXES, "condition": np.array(condition)}
        changed, _ = completed(model_of([node], arrays, {"amounts": AMOUNTS}), amounts=AMOUNTS)
        assert operators(changed) == ["If", "Concat", "Gather", "Pad", "Concat", "Gather", "Pad"]
        names = [value.name for node in changed.graph.all_nodes() for value in node.outputs]
        assert len(names) == len(set(names))


def resize(*inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Resize", ["x", *inputs], ["y"], mode="nearest", **attributes)


@pytest.mark.parametrize(
    ("node", "arrays"),
    [
        (resize("", "scales", axes=[3, 1]), {"scales": np.float32([2, 3])}),
        (resize("", "", "sizes", axes=[-1, 2]), {"sizes": np.array([7, 6])}),
        (
            resize("roi", "scales", axes=[3, 2], coordinate_transformation_mode="tf_crop_and_resize"),
            {"roi": np.float32([0.1, 0.2, 0.8, 0.9]), "scales": np.float32([2, 3])},
        ),
    ],
    ids=["scales", "sizes", "crop"],
)
def test_resizing_is_given_for_all_axes(node, arrays):
    changed, _ = completed(model_of([node], arrays, {}))
    assert operators(changed) == ["Resize"]
    assert "axes" not in list(changed.graph)[-1].attributes
    changed, _ = completed(model_of([node], arrays, {}, ["batch", 3, "height", 5]))
    assert operators(changed)[-1] == "Resize"
    assert "axes" not in list(changed.graph)[-1].attributes
    changed, _ = completed(model_of([node], {}, arrays), **arrays)
    assert operators(changed)[-3:] == ["Concat", "Gather", "Resize"]


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (resize("", "", "sizes", axes=[2, 3], keep_aspect_ratio_policy="not_larger"), X.shape),
        (resize("", "", "sizes", axes=[2, 3]), None),
    ],
    ids=["aspect ratio", "unknown rank"],
)
def test_resizing_that_depends_on_which_axes_are_named_stays(node, shape):
    changed, _ = completed(model_of([node], {"sizes": np.array([8, 8])}, {}, shape))
    assert operators(changed) == ["Resize"]
    assert names_axes(list(changed.graph)[-1])
