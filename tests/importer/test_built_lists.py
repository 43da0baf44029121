"""Lists that loops put together: the same results without sequences, and gradients through what they hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose

import burnish
from burnish.engines import get as engine
from oracles.central_differences import central_differences
from oracles.combinations import diagonal

X = np.random.default_rng(0).normal(size=(4, 2, 3))
ROW = "row = Gather <axis = 0> (x, i) t = Tanh (row) h = Add (t, before) e = Mul (h, w)"


def model(
    read: str, *, insert: str = "SequenceInsert (list, e)", first: str = "empty = SequenceEmpty <dtype = 11> ()"
) -> onnx.ModelProto:
    """A recurrence over the rows of x [T, N, 3] that puts its values into a list; ``read`` computes y of the list ``all``."""
    return onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 18]> g (double[T,N,3] x, double[3] w) => (double y)
        <int64 zero = {{0}}, int64 last = {{-1}}, bool yes = {{1}}, int64[1] axis = {{0}}>
        {{
            count = Shape <end = 1> (x)
            trips = Squeeze (count, axis)
            first = Gather <axis = 0> (x, zero)
            start = Mul (first, first)
            {first}
            final, all = Loop (trips, yes, start, empty) <body = b (int64 i, bool c, double[N,3] before, seq(double[N,3]) list)
                => (bool c2, double[N,3] after, seq(double[N,3]) longer)
                {{ c2 = Identity (c) {ROW} after = Sin (e) longer = {insert} }}>
            {read}
            squares = Mul (part, part)
            powers = Mul (squares, part)
            total = ReduceSum <keepdims = 0> (powers)
            rest = ReduceSum <keepdims = 0> (final)
            y = Mul (total, rest)
        }}"""
    )


def check(source: onnx.ModelProto) -> Counter[str]:
    """Compare what is loaded with its source on ONNX Runtime, and gradients with differences; returns what operators are left."""
    w = np.array([0.5, -0.3, 0.8])
    session = onnxruntime.InferenceSession(source.SerializeToString())
    loaded = burnish.load(source)
    assert_allclose(engine("onnxruntime").run(loaded, {"x": X, "w": w})["y"], session.run(["y"], {"x": X, "w": w})[0], rtol=1e-12)
    results = engine("onnxruntime").run(burnish.grad(source, ["x", "w"]), {"x": X, "w": w})
    for index, name in enumerate("xw"):
        expected = central_differences(
            lambda inputs: float(session.run(["y"], dict(zip("xw", inputs, strict=True)))[0]), [X, w], index
        )
        assert_allclose(results[f"grad:{name}"], expected, rtol=1e-6, atol=1e-8)
    return Counter(node.op_type for node in loaded.graph.all_nodes())


READS = {
    "stacked": "part = ConcatFromSequence <axis = 0, new_axis = 1> (all)",
    "stacked along the second axis": "part = ConcatFromSequence <axis = 1, new_axis = 1> (all)",
    "stacked along the last axis": "part = ConcatFromSequence <axis = -1, new_axis = 1> (all)",
    "joined": "part = ConcatFromSequence <axis = 1> (all)",
    "joined along a named axis": "part = ConcatFromSequence <axis = -2> (all)",
    "the last": "part = SequenceAt (all, last)",
    "counted": """stack = ConcatFromSequence <axis = 0, new_axis = 1> (all) n = SequenceLength (all)
        number = Cast <to = 11> (n) part = Div (stack, number)""",
}


@pytest.mark.slow
@diagonal(("insert", ["SequenceInsert (list, e)", "SequenceInsert (list, e, zero)"]), ("read", READS))
def test_a_list_becomes_what_the_loop_scans(read: str, insert: str) -> None:
    left = check(model(READS[read], insert=insert))
    assert not [name for name in left if "Sequence" in name]


def test_elements_that_may_differ_in_shape_stay_a_list() -> None:
    """Nothing here says that the rows that a NonZero finds are as many in every iteration."""
    source = model("part = ConcatFromSequence <axis = 0> (all)")
    (loop,) = (node for node in source.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    text = "row_mask = Greater (e, before) places = NonZero (row_mask) turned = Transpose <perm = [1, 0]> (places)"
    nodes = onnx.parser.parse_graph(
        f"g (double[N,3] e, double[N,3] before) => (double[M,2] found) {{ {text} found = Cast <to = 11> (turned) }}"
    ).node
    insertion = next(node for node in body.node if node.op_type == "SequenceInsert")
    insertion.input[1] = "found"
    others = [node for node in body.node if node is not insertion]
    del body.node[:]
    body.node.extend([*others, *nodes, insertion])
    left = Counter(node.op_type for node in burnish.load(source).graph.all_nodes())
    assert left["SequenceInsert"] == left["ConcatFromSequence"] == 1


@pytest.mark.slow
@diagonal(
    (
        "first",
        ["empty = SequenceConstruct (start, first)", "one = SequenceConstruct (first) empty = SequenceInsert (one, start)"],
    ),
    ("insert", ["SequenceInsert (list, e)", "SequenceInsert (list, e, zero)"]),
    ("read", ["stacked", "joined", "the last"]),
)
def test_a_list_may_begin_with_elements(read: str, insert: str, first: str) -> None:
    left = check(model(READS[read], insert=insert, first=first))
    assert not [name for name in left if "Sequence" in name]


def test_a_list_that_begins_with_what_is_not_known_stays() -> None:
    source = model(READS["stacked"], first="empty = SplitToSequence <axis = 0, keepdims = 0> (x)")
    left = Counter(node.op_type for node in burnish.load(source).graph.all_nodes())
    assert left["SequenceInsert"] == 1


@pytest.mark.parametrize("rows", ["SequenceAt (pieces, i)", "Gather <axis = 0> (x, i)"])
def test_rows_that_pytorch_unbinds_are_read_in_the_loop(rows: str) -> None:
    """PyTorch's exporter writes ``unbind`` with a size and ``keepdims=0``, which takes the axis away on ONNX Runtime."""
    text = f"""<ir_version: 9, opset_import: ["": 18]> g (double[T,N,3] x, double[3] w) => (double y)
        <int64 one = {{1}}, bool yes = {{1}}, int64[1] axis = {{0}}>
        {{
            pieces = SplitToSequence <axis = 0, keepdims = 0> (x, one)
            trips = SequenceLength (pieces)
            empty = SequenceEmpty <dtype = 11> ()
            all = Loop (trips, yes, empty) <body = b (int64 i, bool c, seq(double[N,3]) list)
                => (bool c2, seq(double[N,3]) longer)
                {{ c2 = Identity (c) row = {rows} e = Mul (row, w) h = Tanh (e) longer = SequenceInsert (list, h) }}>
            part = ConcatFromSequence <axis = 0> (all)
            y = ReduceL2 <keepdims = 0> (part)
        }}"""
    left = check(onnx.parser.parse_model(text))
    assert not [name for name in left if "Sequence" in name]


@pytest.mark.parametrize("name", ["onnxruntime", "torch"])
def test_a_scripted_recurrence_trains_as_in_pytorch(name: str) -> None:
    """As PyTorch exports ``outputs.append(h)`` in a loop over the rows of a batch of any length, and ``torch.stack(outputs)``."""
    source = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[T,N,3] x) => (float[T,N,3] y)
        <float[3,3] weight = {0.1, -0.4, 0.3, 0.5, 0.2, -0.1, -0.3, 0.4, 0.2}, float[3] bias = {0.1, 0, -0.2}, bool yes = {1},
            int64 zero = {0}, int64 one = {1}, int64[1] axis = {0}, int64[1] three = {3}>
        {
            shape = Shape (x)
            rows = Gather <axis = 0> (shape, one)
            row = Unsqueeze (rows, axis)
            extents = Concat <axis = 0> (row, three)
            start = ConstantOfShape (extents)
            empty = SequenceEmpty <dtype = 1> ()
            trips = Gather <axis = 0> (shape, zero)
            final, all = Loop (trips, yes, start, empty) <body = b (int64 t, bool c, float[N,3] before, seq(float[N,3]) list)
                => (bool c2, float[N,3] h, seq(float[N,3]) longer) {
                    xt = Gather <axis = 0> (x, t) sum = Add (xt, before) z = Gemm <transB = 1> (sum, weight, bias) h = Tanh (z)
                    longer = SequenceInsert (list, h) c2 = Identity (yes) }>
            y = ConcatFromSequence <axis = 0, new_axis = 1> (all)
        }"""
    )
    linear = torch.nn.Linear(3, 3)
    weights = {value.name: onnx.numpy_helper.to_array(value) for value in source.graph.initializer}
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weights["weight"].copy()))
        linear.bias.copy_(torch.from_numpy(weights["bias"].copy()))
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    session = burnish.Session(burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=0.5)), engine=name)
    rng = np.random.default_rng(0)
    for length in (4, 2, 5):
        x, targets = (rng.normal(size=(length, 2, 3)).astype(np.float32) for _ in range(2))
        h, rows = torch.zeros(2, 3), []
        for xt in torch.from_numpy(x):
            h = torch.tanh(linear(xt + h))
            rows.append(h)
        loss = torch.nn.functional.mse_loss(torch.stack(rows), torch.from_numpy(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_allclose(session.step({"x": x, "targets": targets})["loss"], loss.item(), rtol=1e-5)
    assert_allclose(session.state()["param/weight"], linear.weight.detach().numpy(), rtol=1e-5, atol=1e-6)
