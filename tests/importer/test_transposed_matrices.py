"""Matrices that are transposed as one batch: one Transpose where extents are known to be the same, and the same results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import burnish

HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
X = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype(np.float32)


def source_of(shape: str, batch: str, perm: str, result: str, more: str = "y = Identity(last)") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""{HEADER}
        g (float{shape} x) => (float[a, b, c, d] y) {{
            batch = Constant<value_ints = {batch}>()
            result = Constant<value_ints = {result}>()
            first = Reshape(x, batch)
            turned = Transpose<perm = {perm}>(first)
            last = Reshape(turned, result)
            {more}
        }}
    """)


def check(source: onnx.ModelProto) -> ir.Model:
    """The loaded model, whose result is that of the source."""
    loaded = burnish.load(source)
    expected = onnxruntime.InferenceSession(source.SerializeToString()).run(["y"], {"x": X})[0]
    np.testing.assert_array_equal(burnish.engines.get("onnxruntime").run(loaded, {"x": X})["y"], expected)
    return loaded


def operators(loaded: ir.Model) -> list[str]:
    return [node.op_type for node in loaded.graph if node.op_type != "Identity"]


@pytest.mark.parametrize("batch", ["[-1, 5, 4]", "[6, 5, 4]"])
@pytest.mark.parametrize("result", ["[-1, 3, 4, 5]", "[2, 3, 4, 5]"])
def test_three_nodes_become_one_and_the_batch_keeps_its_name(batch, result):
    loaded = check(source_of("[samples, 3, 5, 4]", batch, "[0, 2, 1]", result))
    assert operators(loaded) == ["Transpose"]
    (node,) = [node for node in loaded.graph if node.op_type == "Transpose"]
    assert list(node.attributes["perm"].as_ints()) == [0, 1, 3, 2]
    assert str(node.outputs[0].shape) == "[samples,3,4,5]"


def test_matrices_of_open_extents_are_joined_where_their_shape_is_read_from_them():
    source = onnx.parser.parse_model(f"""{HEADER}
        g (float[samples, 3, rows, 4] x) => (float[samples, 3, 4, rows] y) {{
            shape = Shape(x)
            rest = Constant<value_ints = [-1]>()
            columns = Constant<value_ints = [4]>()
            zero = Constant<value_ints = [0]>()
            two = Constant<value_ints = [2]>()
            three = Constant<value_ints = [3]>()
            rows_here = Slice(shape, two, three)
            leading = Slice(shape, zero, two)
            batch = Concat<axis = 0>(rest, rows_here, columns)
            result = Concat<axis = 0>(leading, columns, rows_here)
            first = Reshape(x, batch)
            turned = Transpose<perm = [0, 2, 1]>(first)
            y = Reshape(turned, result)
        }}
    """)
    loaded = check(source)
    assert operators(loaded) == ["Transpose"]


def test_what_else_is_read_of_the_nodes_is_computed():
    loaded = check(
        source_of("[samples, 3, 5, 4]", "[-1, 5, 4]", "[0, 2, 1]", "[-1, 3, 4, 5]", "s = ReduceSum(turned)\n y = Mul(last, s)")
    )
    assert sorted(operators(loaded)) == ["Constant", "Mul", "ReduceSum", "Reshape", "Transpose", "Transpose"]


@pytest.mark.parametrize(
    ("batch", "perm", "result"),
    [
        ("[-1, 5, 4]", "[0, 2, 1]", "[-1, 2, 4, 5]"),
        ("[-1, 5, 4]", "[0, 2, 1]", "[-1, 3, 5, 4]"),
        ("[-1, 4, 5]", "[0, 2, 1]", "[-1, 3, 5, 4]"),
        ("[-1, 10, 2]", "[0, 2, 1]", "[-1, 3, 2, 10]"),
        ("[-1, 5, 4]", "[1, 2, 0]", "[5, 4, 3, -1]"),
        ("[-1, 5, 4]", "[0, 1, 2]", "[-1, 3, 5, 4]"),
    ],
)
def test_any_other_way_stays(batch, perm, result):
    assert operators(check(source_of("[samples, 3, 5, 4]", batch, perm, result))).count("Reshape") == 2


def test_extents_that_are_not_known_to_be_the_same_stay():
    loaded = check(source_of("[samples, heads, rows, columns]", "[-1, 5, 4]", "[0, 2, 1]", "[-1, 3, 4, 5]"))
    assert operators(loaded).count("Reshape") == 2


def test_gradients_flow_through():
    source = source_of("[samples, 3, 5, 4]", "[-1, 5, 4]", "[0, 2, 1]", "[-1, 3, 4, 5]", "y = Mul(last, last)")
    flow = np.random.default_rng(1).normal(size=(2, 3, 4, 5)).astype(np.float32)
    model = burnish.grad(source, wrt=["x"], of="y")
    found = burnish.engines.get("onnxruntime").run(model, {"x": X, "cotangent:y": flow})["grad:x"]
    np.testing.assert_allclose(found, 2 * X * flow.transpose(0, 1, 3, 2), rtol=1e-6)
