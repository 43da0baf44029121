"""What rows and columns of a draw number, by what operators do with samples."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from burnish.importer import load
from burnish.random import Numbered, Places
from burnish.sample_axes import Analysis, numbered, sample_inputs

SAME = Places()
TOGETHER = (Places("x"), SAME)


def samples(slower: int | None = 1, faster: int | None = 1) -> Places:
    return Places("x", slower, faster)


def numbered_value(body: str, inputs: str = "float[batch, t, 6] x") -> Numbered:
    """What a draw for the value y numbers."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (float total)
<int64[1] first = {{0}}, int64[1] second = {{1}}, float[6, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}}> {{
    {body}
    floating = Cast <to = 1> (y)
    total = ReduceSum <keepdims = 0> (floating)
}}""")
    graph = load(model).graph
    value = next(output for node in graph for output in node.outputs if output.name == "y")
    return numbered(Analysis(graph, [value.name or "" for value in graph.inputs]), value)


TOLD = {
    "y = Relu (x)": (samples(faster=None), SAME),
    "y = Transpose <perm = [1, 0, 2]> (x)": (samples(slower=None), SAME),
    "y = Transpose <perm = [1, 2, 0]> (x)": (SAME, samples()),
    "y = ReduceMean <keepdims = 0> (x, second)": TOGETHER,
    "y = ReduceMean <keepdims = 0> (x, first)": (SAME, SAME),
    "y = ArgMax <axis = 2, keepdims = 0> (x)": TOGETHER,
    "y = Flatten (x)": TOGETHER,
    "y = Flatten <axis = 2> (x)": (samples(faster=None), SAME),
    "s = Shape (x) \n y = ConstantOfShape (s)": (samples(faster=None), SAME),
    "y = MatMul (x, w)": (samples(faster=None), SAME),
    "v = Transpose (w) \n t = Transpose <perm = [0, 2, 1]> (x) \n y = MatMul (v, t)": (samples(faster=3), SAME),
    'y = Einsum <equation = "bti,bsi->bts"> (x, x)': (samples(faster=None), SAME),
    'y = Einsum <equation = "bti->tb"> (x)': (SAME, samples()),
    "s = Constant <value_ints = [0, 0, 2, 3]> () \n r = Reshape (x, s) \n y = Transpose <perm = [2, 0, 1, 3]> (r)": (
        samples(slower=2),
        SAME,
    ),
    "c = Constant <value_ints = [2, 1, 1]> () \n y = Tile (x, c)": (samples(slower=2, faster=None), SAME),
    "s = Softmax <axis = 0> (x) \n y = Add (s, x)": (samples(faster=None), SAME),
    "c = Constant <value_ints = [0, 3]> () \n y = Gather <axis = 2> (x, c)": (samples(faster=None), SAME),
    "y, z = Split <axis = 2, num_outputs = 2> (x)": (samples(faster=None), SAME),
    "y = Slice (x, first, second, second)": (samples(faster=None), SAME),
    "c = Constant <value_ints = [0, 1, 0, 0, 0, 2]> () \n y = Pad (x, c)": (samples(faster=None), SAME),
    "c = Constant <value_ints = [1]> () \n y, z = TopK <axis = 2> (x, c)": (samples(faster=None), SAME),
}


@pytest.mark.parametrize(("body", "expected"), TOLD.items(), ids=str)
def test_where_samples_stand(body, expected):
    assert numbered_value(body) == Numbered(*expected)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Concat <axis = 0> (x, x)", "Concat"),
        ("y, z = Split <axis = 0, num_outputs = 2> (x)", "Split"),
        ("n = Shape <start = 0, end = 1> (x) \n y, z = TopK <axis = 0> (x, n)", "TopK"),
        ("c = Constant <value_ints = [1, 0, 0, 0, 0, 0]> () \n y = Pad (x, c)", "Pad"),
        ("c = Constant <value_ints = [-1, 4]> () \n y = Reshape (x, c)", "Reshape"),
        ("s = ReduceSum <keepdims = 0> (x) \n y = GlobalAveragePool (s)", "GlobalAveragePool"),
        ("y = Unique <axis = 0> (x)", "what Unique 'Unique' (output 'y') does with samples is not known"),
        ("l = ReduceMax <keepdims = 0> (x) \n n = Cast <to = 7> (l) \n o = Unsqueeze (n, first) \n y = ConstantOfShape (o)", "O"),
        ("a = Transpose <perm = [1, 0, 2]> (x) \n y = Mul (a, x)", "samples stand along more than one of its axes"),
        ("f = Flatten (x) \n t = Transpose (f) \n y = MatMul (f, t)", "samples stand along more than one of its axes"),
    ],
)
def test_where_samples_are_lost(body, reason):
    told = numbered_value(body)
    assert reason in told.rows.problem
    assert told.rows.problem == told.columns.problem


def test_kernels_that_are_made_of_samples():
    """A convolution with a kernel of each sample has samples among its channels too."""
    told = numbered_value("a = Transpose <perm = [0, 2, 1]> (x) \n k = ReduceMean (a, second) \n y = Conv (a, k)")
    assert "Conv" in told.rows.problem


def test_branches_that_agree():
    told = numbered_value("""
    s = ReduceSum <keepdims = 0> (x)
    c = Cast <to = 9> (s)
    y = If (c) <then_branch = t () => (float[batch, t, 6] a) { a = Relu (x) },
        else_branch = e () => (float[batch, t, 6] b) { b = Identity (x) }>""")
    assert told == Numbered(samples(faster=None), SAME)


def test_branches_that_differ():
    told = numbered_value("""
    s = ReduceSum <keepdims = 0> (x)
    c = Cast <to = 9> (s)
    y = If (c) <then_branch = t () => (float[batch, t, 6] a) { a = Relu (x) },
        else_branch = e () => (float[u, v, 6] b) { b = Transpose <perm = [1, 0, 2]> (x) }>""")
    assert "If" in told.rows.problem


def test_a_loop_over_time_keeps_samples_apart():
    told = numbered_value("""
    n = Constant <value_int = 3> ()
    go = Constant <value = bool {1}> ()
    y, z = Loop (n, go, x) <body = b (int64 i, bool c, float[batch, t, 6] u) =>
        (bool d, float[batch, t, 6] v, float[batch, t, 6] o) {
        d = Identity (c)
        v = Add (u, u)
        o = Identity (u)
    }>""")
    assert told == Numbered(samples(faster=None), SAME)


def test_a_batch_of_a_fixed_size():
    told = numbered_value("c = Constant <value_ints = [-1, 6]> () \n y = Reshape (x, c)", "float[8, 3, 6] x")
    assert told == Numbered(samples(faster=3), SAME)


def test_inputs_that_have_samples():
    assert sample_inputs({"x": ["batch", 3], "mask": ["rows", "t"]}) == ["x", "mask"]
    assert sample_inputs({"positions": ["t"], "tokens": ["batch", "t"]}) == ["tokens"]
    assert sample_inputs({"x": [8, 3], "anchors": [9, 2], "mask": [8]}) == ["x", "mask"]
    assert sample_inputs({"x": [8, 3], "tokens": ["batch", "t"]}) == ["tokens"]
    assert sample_inputs({"rate": []}) == []


def test_an_equation_with_a_letter_of_no_operand():
    """Shape inference lets a letter beyond ASCII pass: what finds the samples has to come through."""
    x, y = (helper.make_tensor_value_info(name, 1, ["b", 6]) for name in "xy")
    node = helper.make_node("Einsum", ["x"], ["y"], equation="ab->\xff")
    graph = load(helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=10)).graph
    assert Analysis(graph, ["x"]).layout(next(iter(graph)).outputs[0]) is not None
