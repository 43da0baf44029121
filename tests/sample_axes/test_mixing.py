"""Models whose answer for one sample depends on the others of its batch: `compile` says so, and of no other."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import burnish
from burnish.errors import ObjectiveWarning

WEIGHTS = {
    "w": (6, 3),
    "square": (6, 6),
    "lstm_w": (1, 24, 6),
    "lstm_r": (1, 24, 6),
    "scale": (6,),
    "bias": (6,),
}
INTEGERS = {
    "zero": [0],
    "one": [1],
    "first": 0,
    "joined": [1, -1, 6],
    "apart": [-1, 5, 6],
    "rows": [-1, 6],
    "steps": [5, -1, 6],
    "wide": [-1, 2, 15],
}
SEQUENCES, VECTORS = "batch, 5, 6", "batch, 6"


def model_of(body: str, shape: str) -> onnx.ModelProto:
    """What makes `f`, float32 [batch, 6], of `x`, and a classifier of that."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 23]> g (float[{shape}] x) => (float[N, 3] y) {{ {body} y = MatMul(f, w) }}'
    )
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in WEIGHTS.items()}
    arrays |= {name: np.array(numbers) for name, numbers in INTEGERS.items()}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in read)
    return model


LAST = "e = Gather <axis = 1> (h, one) f = Squeeze (e, one)"
RECURRENT = "s, last, cell = LSTM <hidden_size = 6> ({}, lstm_w, lstm_r) h = Squeeze (s, one)"
ATTENTION = "t = {} k = Transpose <perm = [0, 2, 1]> (t) q = MatMul (t, k) p = Softmax (q) a = MatMul (p, t)"
MIXED = {
    "Softmax along axis 0": ("f = Softmax <axis = 0> (x)", VECTORS, ["Softmax"]),
    "LogSoftmax along axis 0": ("f = LogSoftmax <axis = 0> (x)", "n, 6", ["LogSoftmax"]),
    "the batch's mean": ("m = ReduceMean (x, zero) f = Sub (x, m)", VECTORS, ["ReduceMean"]),
    "the largest of all": ("m = ReduceMax <keepdims = 0> (x) f = Div (x, m)", VECTORS, ["ReduceMax"]),
    "the range of all": (
        "l = ReduceMin (x) u = ReduceMax (x) d = Sub (x, l) r = Sub (u, l) f = Div (d, r)",
        VECTORS,
        ["ReduceMin", "ReduceMax"],
    ),
    "the largest of all, subtracted": ("m = ReduceMax <keepdims = 0> (x, zero) f = Sub (x, m)", VECTORS, ["ReduceMax"]),
    "the norm of all": ("m = ReduceL2 (x) f = Div (x, m)", "s77, 6", ["ReduceL2"]),
    "a layer's norm of all": ("f = LayerNormalization <axis = 0> (x, scale, bias)", VECTORS, ["LayerNormalization"]),
    "a sum along the batch": ("f = CumSum (x, first)", VECTORS, ["CumSum"]),
    "products of samples": ("t = Transpose (x) g2 = MatMul (t, x) f = MatMul (x, g2)", VECTORS, ["MatMul"]),
    "products by Gemm": ("g2 = Gemm <transA = 1> (x, x) f = MatMul (x, g2)", VECTORS, ["Gemm"]),
    "products by Einsum": ('g2 = Einsum <equation = "bi,bj->ij"> (x, x) f = MatMul (x, g2)', VECTORS, ["Einsum"]),
    "time first": (RECURRENT.format("x") + LAST, SEQUENCES, ["LSTM"]),
    "attention among samples": (
        ATTENTION.format("Transpose <perm = [1, 0, 2]> (x)") + "h = Transpose <perm = [1, 0, 2]> (a)" + LAST,
        SEQUENCES,
        ["Softmax", "MatMul"],
    ),
    "one sequence of all": (
        ATTENTION.format("Reshape (x, joined)") + "h = Reshape (a, apart)" + LAST,
        SEQUENCES,
        ["Softmax", "MatMul"],
    ),
    "a reshape for a transposition": (
        "r = Reshape (x, steps)" + RECURRENT.format("r") + "f = ReduceMean <keepdims = 0> (h, zero)",
        SEQUENCES,
        ["LSTM", "ReduceMean"],
    ),
}
APART = {
    "Softmax along axis 1": ("f = Softmax <axis = 1> (x)", VECTORS),
    "each sample's mean": ("m = ReduceMean (x, one) f = Sub (x, m)", VECTORS),
    "the largest of all, in exponents": (
        "m = ReduceMax <keepdims = 0> (x) d = Sub (x, m) e = Exp (d) t = ReduceSum (e, one) f = Div (e, t)",
        VECTORS,
    ),
    "the largest of all, before a Softmax": ("m = ReduceMax (x) d = Sub (x, m) f = Softmax (d)", VECTORS),
    "samples second": (
        "t = Transpose <perm = [1, 0, 2]> (x)" + RECURRENT.format("t") + "f = ReduceMean <keepdims = 0> (h, zero)",
        SEQUENCES,
    ),
    "attention within samples": (ATTENTION.format("Identity (x)") + "f = ReduceMean <keepdims = 0> (a, one)", SEQUENCES),
    "rows of all samples": ("r = Reshape (x, rows) m = MatMul (r, square) h = Reshape (m, apart)" + LAST, SEQUENCES),
    "a sample cut into parts": (
        "r = Reshape (x, wide) s = Softmax <axis = 1> (r) h = Reshape (s, apart)" + LAST,
        SEQUENCES,
    ),
    "a sequence": ("f = Softmax <axis = 0> (x)", "time, 6"),
    "a cloud of points": ("m = ReduceMax <keepdims = 1> (x, zero) f = Add (x, m)", "num_points, 6"),
}


def compiled_with(body: str, shape: str) -> list[str]:
    """What is said of the samples when the model is compiled."""
    model = model_of(body, shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        burnish.compile(model)
    return [str(each.message) for each in caught if issubclass(each.category, ObjectiveWarning)]


@pytest.mark.parametrize("name", MIXED)
def test_nodes_that_mix_samples_are_named(name):
    body, shape, operators = MIXED[name]
    (said,) = compiled_with(body, shape)
    assert said.startswith("what the model computes of a sample depends on the others of its batch")
    assert "the first axis of the input 'x'" in said
    named = said.partition("work along it: ")[2].partition(". Where")[0]
    assert [each.split(" ")[0] for each in named.split(", ")] == operators
    assert "batch_first=True" in said


@pytest.mark.parametrize("name", APART)
def test_nothing_is_said_where_samples_stay_apart(name):
    assert compiled_with(*APART[name]) == []


def test_the_input_whose_samples_are_mixed_is_named():
    """Of two with as many samples: the other one, which has them along its second axis."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 23]>
g (float[batch, 6] x, float[4, batch] seen) => (float[batch, 6] y) <int64[1] one = {1}> {
  total = ReduceMean (seen, one) part = ReduceMax <keepdims = 0> (total) m = MatMul (x, w) y = Mul (m, part)
}""")
    model.graph.initializer.append(numpy_helper.from_array(np.eye(6, dtype=np.float32), "w"))
    with pytest.warns(ObjectiveWarning, match="axis 1 of the input 'seen' is that of the samples"):
        burnish.compile(model, sample_axis={"seen": 1})
