"""An If that the shapes of a model decide becomes its branch; any other stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.importer import load
from oracles.onnxruntime_outputs import onnxruntime_outputs

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
