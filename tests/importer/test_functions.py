"""Model-local functions: what they stand for, and how far they may grow a model."""

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

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
