"""Selections that move before what computes the rows they select: how far, what stops them, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.rewriting.hoist_gather import hoist_gather

HEADER = '<ir_version: 10, opset_import: ["": 20]>\n'
ATTENTION = """graph (float[batch, 6, 8] x, float[6, 6] mask) => (float[batch, 3] y)
<float[8, 8] q, float[8, 8] k, float[8, 8] v, float[8] s, float[8, 8] o, float[8] b, float[8, 16] u, float[16, 8] d,
 float[8, 3] c> {{
    heads = Constant <value_ints = [0, 0, 2, 4]> ()
    merged = Constant <value_ints = [0, 0, 8]> ()
    index = Constant <{index}> ()
    xq = MatMul (x, q)
    hq = Reshape (xq, heads)
    tq = Transpose <perm = [0, 2, 1, 3]> (hq)
    xk = MatMul (x, k)
    hk = Reshape (xk, heads)
    tk = Transpose <perm = [0, 2, 3, 1]> (hk)
    xv = MatMul (x, v)
    hv = Reshape (xv, heads)
    tv = Transpose <perm = [0, 2, 1, 3]> (hv)
    scores = MatMul (tq, tk)
    masked = Add (scores, mask)
    weights = Softmax <axis = -1> (masked)
    mixed = MatMul (weights, tv)
    back = Transpose <perm = [0, 2, 1, 3]> (mixed)
    rows = Reshape (back, merged)
    out = MatMul (rows, o)
    added = Add (x, out)
    n = LayerNormalization <axis = -1> (added, s, b)
    wide = MatMul (n, u)
    active = Gelu (wide)
    narrow = MatMul (active, d)
    m = Add (narrow, n)
    first = Gather <axis = 1> (m, index)
    {end}
}}"""
ONE = {"index": "value_int = 0", "end": "y = MatMul (first, c)"}
LAST = {"index": "value_int = -1", "end": "y = MatMul (first, c)"}
TWO = {"index": "value_ints = [3, 0]", "end": "p = MatMul (first, c)\n axes = Constant <value_ints = [1]> ()\n"
       " y = ReduceMean <keepdims = 0> (p, axes)"}  # fmt: skip


def model_of(text: str, seed: int = 0) -> ir.Model:
    proto = onnx.parser.parse_model(HEADER + text)
    generator = np.random.default_rng(seed)
    for value in list(proto.graph.value_info):
        shape = [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        array = generator.normal(scale=0.5, size=shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    return burnish.load(proto)


def attention(**form: str) -> ir.Model:
    return model_of(ATTENTION.format(**form))


def extents(model: ir.Model) -> dict[str, list[int]]:
    return {node.outputs[0].name: [e for e in node.outputs[0].shape if isinstance(e, int)] for node in model.graph}


@pytest.mark.parametrize("form", [ONE, LAST, TWO])
def test_the_last_layer_of_a_classifier_computes_the_rows_that_are_read(form):
    model = attention(**form)
    inputs = {name: np.random.default_rng(1).normal(size=shape).astype(np.float32) for name, shape in
              {"x": (5, 6, 8), "mask": (6, 6)}.items()}  # fmt: skip
    before = OnnxRuntimeEngine().run(model, inputs)["y"]
    hoist_gather(model)
    rows = 2 if form is TWO else 1
    shapes = extents(model)
    for name in ("xq", "rows", "out", "added", "n", "wide", "m"):
        assert shapes[name][0] == rows, name
    assert shapes["scores"] == [2, rows, 6]
    assert shapes["xk"] == [6, 8]  # keys and values are read whole
    gathers = [node for node in model.graph if node.op_type == "Gather"]
    assert sorted(node.inputs[0].name for node in gathers) == ["mask", "x"]
    after = OnnxRuntimeEngine().run(model, inputs)["y"]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_gradients_are_those_of_the_model_as_it_was(engine):
    model = attention(**ONE)
    inputs = {"x": np.random.default_rng(1).normal(size=(3, 6, 8)).astype(np.float32), "mask": np.zeros((6, 6), np.float32)}
    batch = {**inputs, "labels": np.array([0, 2, 1])}
    program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=1.0), trainable=list("qkvsobudc"))
    wide = [node.outputs[0].shape for node in program.grad.graph if node.op_type == "MatMul" and node.outputs[0].name == "wide"]
    assert [list(shape)[1:] for shape in wide] == [[1, 16]]
    session = burnish.Session(program, engine=engine)
    before = session.state()
    session.step(batch)
    moved = {name: before[f"param/{name}"] - session.state()[f"param/{name}"] for name in "qkvsobudc"}
    plain = burnish.grad(attention(**ONE), wrt=list("qkvsobudc"), of="y")  # of the model as it was
    logits = OnnxRuntimeEngine().run(attention(**ONE), inputs)["y"]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    cotangent = ((probabilities - np.eye(3)[batch["labels"]]) / 3).astype(np.float32)
    exact = OnnxRuntimeEngine().run(plain, {**inputs, "cotangent:y": cotangent})
    for name, change in moved.items():
        np.testing.assert_allclose(change, exact[f"grad:{name}"], rtol=1e-3, atol=2e-6)


CHAIN = """graph (float[batch, 6, 8] x) => (float[batch, 8] y{more}) <float[8, 8] w> {{
    index = Constant <value_int = 0> ()
    {body}
    y = Gather <axis = 1> (m, index)
}}"""


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("m = MatMul (x, w)", ", float[batch, 6, 8] m"),  # read whole, as an output
        ("m = MatMul (x, w)\n z = ReduceMax (m)", ", float[1, 1, 1] z"),  # read whole
        ("p = MatMul (x, w)\n m = Softmax <axis = 1> (p)", ""),  # every row is computed from all
        ("p = MatMul (x, w)\n m = CumSum (p, index)", ""),
        ("p = MatMul (x, w)\n m = LpNormalization <axis = 1> (p)", ""),
        (
            "p = MatMul (x, w)\n t = Transpose <perm = [0, 2, 1]> (p)\n s = Constant <value_ints = [0, 6, 8]> ()\n"
            " m = Reshape (t, s)",
            "",
        ),
        ("m = Relu (x)", ""),  # saves no product
    ],
)
def test_what_stops_a_selection(body, more):
    model = model_of(CHAIN.format(body=body, more=more))
    before = [(node.op_type, [value.name for value in node.inputs]) for node in model.graph]
    hoist_gather(model)
    assert [(node.op_type, [value.name for value in node.inputs]) for node in model.graph] == before


def test_two_selections_of_one_value_stay():
    model = model_of(
        """graph (float[batch, 6, 8] x) => (float[batch, 8] y, float[batch, 8] z) <float[8, 8] w> {
    one = Constant <value_int = 0> ()
    other = Constant <value_int = 1> ()
    m = MatMul (x, w)
    y = Gather <axis = 1> (m, one)
    z = Gather <axis = 1> (m, other)
}"""
    )
    hoist_gather(model)
    assert extents(model)["m"] == [6, 8]


@pytest.mark.parametrize("extent", ["6", "tokens"])
def test_a_selection_of_the_batch_or_of_an_open_axis_moves_too(extent):
    model = model_of(
        f"""graph (float[batch, {extent}, 8] x) => (float[{extent}, 4] y) <float[8, 4] w, float[4] b> {{
    index = Constant <value_int = 1> ()
    p = MatMul (x, w)
    m = Add (p, b)
    y = Gather <axis = 0> (m, index)
}}"""
    )
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    before = OnnxRuntimeEngine().run(model, {"x": x})["y"]
    hoist_gather(model)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Gather", "MatMul", "Add", "Squeeze"]
    np.testing.assert_allclose(OnnxRuntimeEngine().run(model, {"x": x})["y"], before, rtol=1e-6)


def test_rows_of_a_matrix_pass_a_gemm():
    model = model_of(
        """graph (float[rows, 8] x) => (float[2, 4] y) <float[4, 8] w, float[4] b> {
    index = Constant <value_ints = [5, 1]> ()
    m = Gemm <transB = 1> (x, w, b)
    y = Gather <axis = 0> (m, index)
}"""
    )
    x = np.random.default_rng(0).normal(size=(7, 8)).astype(np.float32)
    before = OnnxRuntimeEngine().run(model, {"x": x})["y"]
    hoist_gather(model)
    assert extents(model)["m"] == [2, 4]
    np.testing.assert_allclose(OnnxRuntimeEngine().run(model, {"x": x})["y"], before, rtol=1e-6)


def test_rows_do_not_pass_a_gemm_whose_addend_has_rows_of_its_own():
    model = model_of(
        """graph (float[7, 8] x) => (float[2, 4] y) <float[8, 4] w, float[7, 4] b> {
    index = Constant <value_ints = [5, 1]> ()
    m = Gemm (x, w, b)
    y = Gather <axis = 0> (m, index)
}"""
    )
    hoist_gather(model)
    assert extents(model)["m"] == [7, 4]
