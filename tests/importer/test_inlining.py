"""Functions and decided branches as the nodes that they stand for."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.errors import ModelError
from burnish.importer import inlining as functions
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

X = np.array([[0.5, -1.0, 2.0]], np.float32)
IMPORTS = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]


def calling(nodes, local, outputs=("y",)):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", *outputs)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=IMPORTS, ir_version=9, functions=local)


def function(name, nodes, inputs=("a",), outputs=("b",), attributes=()):
    return helper.make_function("local", name, list(inputs), list(outputs), nodes, IMPORTS, list(attributes))


def call(name, inputs, outputs, **attributes):
    return helper.make_node(name, inputs, outputs, domain="local", **attributes)


def agrees(proto):
    model = load(proto)
    assert not model.functions
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    expected, actual = onnxruntime_outputs(proto, {"x": X}), onnxruntime_outputs(model, {"x": X})
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value)
    return model


def ten_wide(depth):
    """Functions that each call the next ten times."""
    levels = []
    for level in range(depth):
        last = level == depth - 1
        names = ["a", *(f"t{index}" for index in range(9)), "b"]
        pairs = itertools.pairwise(names)
        nodes = [
            helper.make_node("Neg" if last else f"F{level + 1}", [one], [other], domain="" if last else "local")
            for one, other in pairs
        ]
        levels.append(function(f"F{level}", nodes))
    return calling([call("F0", ["x"], ["y"])], levels)


def test_nested_calls_are_expanded():
    model = agrees(ten_wide(2))
    assert [node.op_type for node in model.graph] == ["Neg"] * 100
    names = [output.name for node in model.graph for output in node.outputs]
    assert len(set(names)) == 100
    assert names[-1] == "y"


def test_attributes_come_from_the_call_or_from_the_default_or_are_left_out():
    leaky = helper.make_node("LeakyRelu", ["a"], ["c"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    plain = function("Leaky", [leaky, helper.make_node("Neg", ["c"], ["b"])], attributes=["slope"])
    agrees(calling([call("Leaky", ["x"], ["h"], slope=0.5), call("Leaky", ["h"], ["y"])], [plain]))
    plain.ClearField("attribute")
    plain.attribute_proto.append(helper.make_attribute("slope", 0.25))
    agrees(calling([call("Leaky", ["x"], ["h"], slope=0.5), call("Leaky", ["h"], ["y"])], [plain]))


def test_an_input_may_be_left_out_and_passed_through():
    # ONNX Runtime itself refuses calls that leave an input out.
    clip = function("Bounded", [helper.make_node("Clip", ["a", "low"], ["b"])], inputs=("a", "low"), outputs=("b", "a"))
    model = load(calling([call("Bounded", ["x"], ["y", "same"])], [clip], outputs=("y", "same")))
    assert [value.name for value in model.graph.inputs] == ["x"]
    outputs = onnxruntime_outputs(model, {"x": X})
    assert outputs.keys() == {"y", "same"}
    np.testing.assert_array_equal(outputs["y"], X)
    np.testing.assert_array_equal(outputs["same"], X)


def test_functions_in_branches_are_expanded():
    body = helper.make_graph(
        [call("Twice", ["x"], ["inside"])], "body", [], [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)]
    )
    twice = function("Twice", [helper.make_node("Add", ["a", "a"], ["b"])])
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("IsNaN", ["sum"], ["condition"]),
        helper.make_node("If", ["condition"], ["y"], then_branch=body, else_branch=body),
    ]
    model = agrees(calling(nodes, [twice]))
    assert [node.op_type for node in model.graph.all_nodes()].count("Add") == 2


def test_a_small_model_that_grows_without_bound_is_a_named_error():
    proto = ten_wide(10)
    assert len(proto.SerializeToString()) < 3000
    with pytest.raises(ModelError, match=r"'local\.F0' .* 11,111,111,110 nodes: from 101 nodes .*inline_local_functions"):
        load(proto)


def test_nothing_is_expanded_before_it_is_counted(monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("a function was copied")

    monkeypatch.setattr(ir.Function, "clone", refuse)
    with pytest.raises(ModelError, match=r"'local\.F0'"):
        load(ten_wide(6))


def test_the_bound_grows_with_the_file(monkeypatch):
    """Each node may become a hundred: a large file is never refused for its size."""
    monkeypatch.setattr(functions, "SMALL_EXPANSION", 100)
    layer = function(
        "Layer", [helper.make_node("Neg", ["a" if i == 0 else f"t{i}"], [f"t{i + 1}"]) for i in range(60)], (), ("t60",)
    )
    layer.input.append("a")
    nodes = [call("Layer", ["x"], ["h"]), call("Layer", ["h"], ["y"])]
    assert sum(1 for _ in load(calling(nodes, [layer])).graph) == 120


def test_a_call_with_too_many_inputs_is_a_named_error():
    one = function("One", [helper.make_node("Neg", ["a"], ["b"])])
    with pytest.raises(ModelError, match=r"inputs|input"):
        load(calling([call("One", ["x", "x"], ["y"])], [one]))


HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'
SQUEEZED = """g (float[N, {extent}] x) => ({outputs})
<float[3] w = {{1, 2, 3}}, int64 one = {{1}}, int64[1] axis = {{1}}> {{
    shape = Shape (x)
    extent = Gather (shape, one)
    narrow = Equal (extent, one)
    y = If (narrow) <
        then_branch = narrow_graph () => (squeezed) {{ squeezed = Squeeze (x, axis) }},
        else_branch = wide_graph () => (same) {{ same = Mul (x, w) }}
    >
    {behind}
}}"""


def model(extent: int | str, behind: str = "", outputs: str = "float[N] y") -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + SQUEEZED.format(extent=extent, behind=behind, outputs=outputs))


def kinds(loaded: ir.Model) -> list[str]:
    return [node.op_type for node in loaded.graph if node.op_type != "Constant"]


@pytest.mark.parametrize(
    ("extent", "outputs", "branch"), [(1, "float[N] y", ["Squeeze"]), (3, "float[N, 3] y", ["Mul"]), ("M", "float y", None)]
)
def test_the_branch_that_the_shape_decides(extent: int | str, outputs: str, branch: list[str] | None) -> None:
    proto = model(extent, outputs=outputs)
    loaded = load(proto)
    if branch is None:
        assert kinds(loaded)[-1] == "If"
        return
    assert kinds(loaded) == branch
    assert loaded.graph.outputs[0].name == "y"
    onnx.checker.check_model(ir.to_proto(loaded), full_check=True)
    x = np.random.default_rng(0).normal(size=(4, extent)).astype(np.float32)
    expected = x[:, 0] if extent == 1 else x * np.float32([1, 2, 3])
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"x": x})["y"], expected)


def test_gradients_flow_through_the_branch() -> None:
    gradients = burnish.grad(model(3, outputs="float[N, 3] y"), ["w"])
    x, dy = (np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32) for seed in (0, 1))
    found = burnish.engines.get("onnxruntime").run(gradients, {"x": x, "cotangent:y": dy})["grad:w"]
    np.testing.assert_allclose(found, (x * dy).sum(0), rtol=1e-6)


@pytest.mark.parametrize("extent", [3, 1])
def test_gradients_of_a_branch_that_stays(extent: int) -> None:
    """The branch that is not taken has gradients of zero."""
    gradients = burnish.grad(model("M", behind="z = ReduceSum <keepdims = 0> (y)", outputs="float z"), ["w", "x"])
    x = np.random.default_rng(0).normal(size=(4, extent)).astype(np.float32)
    found = burnish.engines.get("onnxruntime").run(gradients, {"x": x})
    w = np.float32([1, 2, 3])
    np.testing.assert_allclose(found["grad:w"], x.sum(0) if extent == 3 else np.zeros(3), rtol=1e-6)
    np.testing.assert_array_equal(found["grad:x"], np.broadcast_to(w if extent == 3 else np.float32(1), x.shape))


def test_a_branch_in_a_branch_and_its_weights() -> None:
    """A weight that stands in the branch as a constant is a weight like any other."""
    proto = onnx.parser.parse_model(
        HEADER
        + """g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z)
<bool yes = {1}, bool no = {0}> {
    h = Relu (x)
    y, z = If (yes) <
        then_branch = outer () => (a, same) {
            same = Identity (h)
            a = If (no) <
                then_branch = inner () => (b) { b = Neg (x) },
                else_branch = other () => (c) {
                    weight = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
                    c = MatMul (h, weight)
                }
            >
        },
        else_branch = never () => (d, e) { d = Neg (x) e = Abs (x) }
    >
}"""
    )
    loaded = load(proto)
    assert sorted(kinds(loaded)) == ["Identity", "MatMul", "Relu"]
    assert [value.name for value in loaded.graph.outputs] == ["y", "z"]
    assert "weight" in loaded.graph.initializers
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    before, after = (onnxruntime_outputs(each, {"x": x}) for each in (proto, loaded))
    for name in ("y", "z"):
        np.testing.assert_array_equal(after[name], before[name])


TWO_NETWORKS = """g (float[N, 2] x{inputs}) => (float[N, 2] y)
<{condition}float[2] first = {{1, 2}}, float[2] second = {{3, 4}}> {{
    y = If (c) <
        then_branch = one () => (u) <float[2, 2] w = {{1, 2, 3, 4}}> {{ p = MatMul (x, w) u = Add (p, first) }},
        else_branch = two () => (v) <float[2, 2] w = {{5, 6, 7, 8}}> {{ p = MatMul (x, w) v = Add (p, second) }}
    >
}}"""


@pytest.mark.parametrize(("condition", "elements", "other"), [(1, [1, 2, 3, 4], "first"), (0, [5, 6, 7, 8], "second")])
def test_weights_of_the_other_branch_go_with_it(condition: int, elements: list[int], other: str) -> None:
    """Those of the branch that is taken have their names, also where both have a weight of one name."""
    loaded = load(onnx.parser.parse_model(HEADER + TWO_NETWORKS.format(inputs="", condition=f"bool c = {{{condition}}}, ")))
    assert {name for name, value in loaded.graph.initializers.items() if value.dtype == ir.DataType.FLOAT} == {"w", other}
    weight = loaded.graph.initializers["w"].const_value
    assert weight is not None
    assert weight.numpy().ravel().tolist() == elements
    undecided = load(onnx.parser.parse_model(HEADER + TWO_NETWORKS.format(inputs=", bool c", condition="")))
    assert set(undecided.graph.initializers) == {"w", "w_1", "first", "second"}


def test_a_branch_that_is_never_taken_need_not_fit() -> None:
    """The shape of an input decides, and the pieces of the other branch are more than there are elements."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 20]> g (float[3] x, int64[4] size) => (float[M] y) {
        four = Constant <value_int = 4> ()
        count = Size (size)
        is_short = Equal (count, four)
        limit = If (is_short) <
            then_branch = short () => (int64[1] one) { one, b, c, d = Split <num_outputs = 4> (size) },
            else_branch = long () => (int64[1] last) {
                e, f, g, h, last = Split <num_outputs = 5> (size)
            }>
        zero = Constant <value_int = 0> ()
        step = Constant <value_int = 1> ()
        places = Range (zero, limit, step)
        y = Gather (x, places)
    }""")
    loaded = burnish.load(model)
    assert "If" not in {node.op_type for node in loaded.graph}
    feeds = {"x": np.array([1, 2, 3], np.float32), "size": np.array([2, 7, 7, 7])}
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, feeds)["y"], [1, 2])
