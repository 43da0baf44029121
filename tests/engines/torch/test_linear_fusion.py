"""Products with a weight as one kernel: what is recognized, what is not, and the digits of values and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.linear import linear, linear_gradients, linear_weight_gradient
from burnish.engines.torch.translate.translation import run, translate
from burnish.kernels.linear import fuse_linear, use_linear_gradients
from burnish.operators.matmul import LINEAR_GRAD
from oracles.combinations import diagonal
from oracles.semantic_gradients import semantic_gradients

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
LINEAR = """graph (float[batch, 5, {k}] x, float[{n}, {k}] w, float[{n}] b) => (float[batch, 5, {n}] y) {{
    t = Transpose <perm = [1, 0]> (w)
    p = MatMul (x, t)
    y = Add (b, p)
}}"""
GEMM = """graph (float[rows, {k}] x, float[{n}, {k}] w, float[{n}] b) => (float[rows, {n}] y) {{
    y = Gemm <transB = 1> (x, w, b)
}}"""


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def fused(model: ir.Model) -> list[str]:
    use_linear_gradients(model.graph)
    fuse_linear(model.graph)
    model.opset_imports.setdefault("burnish", 1)
    return sorted(node.op_type for node in model.graph if node.op_type != "Constant")


def computed(model: ir.Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    module = translate(model, torch.device("cpu"))
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return {name: tensor.numpy() for name, tensor in run(module, model, tensors).items()}


@diagonal(
    ("threads", [1, 2]),
    (("rows", "k", "n"), [(3, 7, 11), (1, 1, 1), (0, 4, 3), (64, 700, 130), (130, 520, 300), (130, 300, 520)]),
    ("text", [LINEAR, GEMM]),
    test=13,
)
def test_a_layer_and_its_gradients_keep_their_digits(text, rows, k, n, threads):
    model = semantic_gradients(onnx.parser.parse_model(HEADER + text.format(k=k, n=n)), wrt=["x", "w", "b"], of="y")
    kinds = fused(model)
    if text is GEMM:
        assert kinds == ["FusedLinear", "FusedLinearGrad"]
    else:
        assert kinds.count("FusedLinear") == kinds.count("FusedLinearGrad") == 1
    assert not {"MatMul", "Gemm", "Transpose", "Add"} & set(kinds)
    generator = np.random.default_rng(rows)
    lead = (rows, 5) if text is LINEAR else (rows,)
    x = generator.normal(size=(*lead, k)).astype(np.float32)
    w, b = generator.normal(size=(n, k)).astype(np.float32), generator.normal(size=n).astype(np.float32)
    dy = generator.normal(size=(*lead, n)).astype(np.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = computed(model, {"x": x, "w": w, "b": b, "cotangent:y": dy})
        again = computed(model, {"x": x, "w": w, "b": b, "cotangent:y": dy})
    finally:
        torch.set_num_threads(before)
    wide = {"x": x.astype(np.float64), "w": w.astype(np.float64), "dy": dy.astype(np.float64)}
    exact = {
        "y": wide["x"] @ wide["w"].T + b,
        "grad:x": wide["dy"] @ wide["w"],
        "grad:w": wide["dy"].reshape(-1, n).T @ wide["x"].reshape(-1, k),
        "grad:b": wide["dy"].reshape(-1, n).sum(0),
    }
    terms = {"y": k, "grad:x": n, "grad:w": x.size // k, "grad:b": x.size // k}
    for name, value in exact.items():
        assert found[name].shape == value.shape
        # A sum of n products of normal numbers is off by about sqrt(n) roundings of its size, also about sqrt(n).
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6 * max(terms[name], 1) ** 0.5 * 2)
        np.testing.assert_array_equal(found[name], again[name])


def test_a_large_product_lets_nan_and_infinity_through():
    model = parsed(LINEAR.format(k=512, n=512))
    fused(model)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 5, 512)).astype(np.float32)
    x[3, 2, 7], x[4, 4, 500] = np.nan, np.inf
    w = np.abs(generator.normal(size=(512, 512))).astype(np.float32)
    y = computed(model, {"x": x, "w": w, "b": np.zeros(512, np.float32)})["y"]
    assert np.isnan(y[3, 2]).all()
    assert np.isposinf(y[4, 4]).all()
    rest = np.ones((20, 5), bool)
    rest[3, 2] = rest[4, 4] = False
    assert np.isfinite(y[rest]).all()


@pytest.mark.parametrize("k", [6, 600])
def test_operands_that_lie_transposed_in_memory_are_read_as_they_are(k):
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(k, 320)).astype(np.float32), generator.normal(size=(k, 320)).astype(np.float32)
    one, other = torch.from_numpy(left).t(), torch.from_numpy(right).t()
    with torch.inference_mode():
        y = linear(one, other, None, True, False).numpy()
        gradient = linear_weight_gradient(one, other).numpy()
    np.testing.assert_allclose(y, left.T.astype(np.float64) @ right, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, left.astype(np.float64) @ right.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        "graph (float[2, 3, 4] x, float[2, 4, 5] w) => (float[2, 3, 5] y) { y = MatMul (x, w) }",
        "graph (float[4] x, float[4, 5] w) => (float[5] y) { y = MatMul (x, w) }",
        "graph (float[3, 4] x, float[4] w) => (float[3] y) { y = MatMul (x, w) }",
        "graph (float[3, 4] x, float[4, 5] w) => (float[3, 5] y) { y = Gemm <alpha = 0.5> (x, w) }",
        "graph (float[3, 4] x, float[4, 5] w, float[3, 5] b) => (float[3, 5] y) { y = Gemm (x, w, b) }",
        "graph (float[3, 4] x, float[4, 5] w, float[5] b) => (float[3, 5] y) { y = Gemm <beta = 2.0> (x, w, b) }",
        "graph (double[3, 4] x, double[4, 5] w) => (double[3, 5] y) { y = MatMul (x, w) }",
        "graph (float[4, 3] x, float[5, 4] w) => (float[3, 5] y) { y = Gemm <transA = 1, transB = 1> (x, w) }",
    ],
)
def test_other_products_stay(body):
    model = parsed(body)
    before = sorted(node.op_type for node in model.graph)
    assert fused(model) == before


def test_what_is_added_over_rows_is_no_bias():
    model = parsed(
        "graph (float[5, 4] x, float[4, 5] w, float[5, 1] b) => (float[5, 5] y) { p = MatMul (x, w)\n y = Add (p, b) }"
    )
    assert fused(model) == ["Add", "FusedLinear"]
    x, w, b = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((5, 4), (4, 5), (5, 1)))
    np.testing.assert_allclose(computed(model, {"x": x, "w": w, "b": b})["y"], x @ w + b, rtol=1e-5, atol=1e-6)


def test_values_that_are_read_twice_are_still_there():
    model = parsed(
        """graph (float[3, 4] x, float[5, 4] w, float[5] b) => (float[3, 5] y, float[3, 5] p, float[4, 5] t) {
    t = Transpose <perm = [1, 0]> (w)
    p = MatMul (x, t)
    y = Add (p, b)
}"""
    )
    assert fused(model) == ["Add", "FusedLinear", "Transpose"]
    x, w, b = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3, 4), (5, 4), (5,)))
    found = computed(model, {"x": x, "w": w, "b": b})
    np.testing.assert_allclose(found["p"], x @ w.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["y"], x @ w.T + b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["t"], w.T)


PERCEPTRON = """graph (float[rows, 5] x, float[7, 5] w, float[7] b, float[7, 3] v, float[3] c) => (float[rows, 3] y) {
    h = Gemm <transB = 1> (x, w, b)
    r = Relu (h)
    p = MatMul (r, v)
    y = Add (p, c)
}"""


@pytest.mark.parametrize("rows", [0, 1, 6, 30_000])
def test_layers_with_a_relu_between_and_their_gradients_are_a_call_each(rows):
    source, wrt = onnx.parser.parse_model(HEADER + PERCEPTRON), ["w", "b", "v", "c"]
    model, plain = semantic_gradients(source, wrt=wrt, of="y"), burnish.grad(source, wrt=wrt, of="y")
    assert fused(model) == ["FusedLinear", "FusedLinear", "FusedLinearGrad", "FusedLinearGrad"]
    generator = np.random.default_rng(rows)
    shapes = {"x": (rows, 5), "w": (7, 5), "b": (7,), "v": (7, 3), "c": (3,), "cotangent:y": (rows, 3)}
    inputs = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found, expected = computed(model, inputs), computed(plain, inputs)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6 * max(rows, 1) ** 0.5 * 4, err_msg=name)


@pytest.mark.parametrize("of_bias", [False, True])
def test_the_gradients_of_a_layer_whose_weight_alone_trains_are_one_operator(of_bias):
    source = onnx.parser.parse_model(HEADER + GEMM.format(k=4, n=3))
    model = semantic_gradients(source, wrt=["w", "b"] if of_bias else ["w"], of="y")
    (node,) = [node for node in model.graph if LINEAR_GRAD.is_of(node)]
    assert [value.name for value in node.inputs if value is not None] == ["cotangent:y", "x"]
    assert node.attributes["bias"].value == of_bias
    assert "ReduceSum" not in [node.op_type for node in model.graph]


@pytest.mark.parametrize("text", [LINEAR, GEMM])
def test_what_a_frozen_layer_was_given_is_not_read_again(text):
    source = onnx.parser.parse_model(HEADER + text.format(k=4, n=3))
    model, plain = semantic_gradients(source, wrt=["x"], of="y"), burnish.grad(source, wrt=["x"], of="y")
    (node,) = [node for node in model.graph if LINEAR_GRAD.is_of(node)]
    assert node.inputs[1] is None
    assert fused(model) == ["FusedLinear", "FusedLinear"]
    shapes = {"x": (2, 5, 4), "w": (3, 4), "b": (3,), "cotangent:y": (2, 5, 3)} if text is LINEAR else {}
    shapes = shapes or {"x": (2, 4), "w": (3, 4), "b": (3,), "cotangent:y": (2, 3)}
    inputs = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found, expected = computed(model, inputs), computed(plain, inputs)
    np.testing.assert_allclose(found["grad:x"], expected["grad:x"], rtol=1e-5, atol=1e-6)


def test_a_relu_whose_sum_is_read_elsewhere_stays():
    model = parsed(
        """graph (float[3, 4] x, float[4, 5] w) => (float[3, 5] y, float[3, 5] p) {
    p = MatMul (x, w)
    y = Relu (p)
}"""
    )
    assert fused(model) == ["FusedLinear", "Relu"]


def test_gradients_of_small_layers_let_nan_through_where_a_relu_did():
    dy, weight = torch.ones(3, 2), torch.ones(2, 4)
    x = torch.tensor([[1.0, 0.0, -0.0, torch.nan]]).expand(3, 4)
    with torch.inference_mode():
        dx, dw, db = linear_gradients(dy, x, weight, False, False, True, True)
        swapped = linear_gradients(dy.t().contiguous().t(), x, None, False, True, False, False)
    assert dx.tolist() == [[2.0, 0.0, 0.0, 2.0]] * 3
    assert dw[:, :3].tolist() == [[3.0, 0.0, 0.0]] * 2
    assert dw[:, 3].isnan().all()
    assert db.tolist() == [3.0, 3.0]
    assert swapped[0].numel() == swapped[2].numel() == 0
    torch.testing.assert_close(swapped[1], dw.t(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not kernels.available("linear"), reason="needs a C++ compiler for the engine's kernels")
def test_gradients_of_operands_that_do_not_fit_are_refused():
    gradients = torch.ops.burnish.linear_gradient
    with pytest.raises(RuntimeError, match="x \\[M, K\\] expected"):
        gradients(torch.ones(3, 2), torch.ones(4, 2), None, False, False, False, False)
    with pytest.raises(RuntimeError, match="float32 expected"):
        gradients(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.float64), None, False, False, False, False)
    with pytest.raises(RuntimeError, match="of the shape of x"):
        gradients(torch.ones(3, 2), torch.ones(3, 5), torch.ones(2, 4), False, False, True, False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_small_layer_lets_nan_through_its_relu(transposed, has_bias, rows):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 7), (7, 11), (11,)))
    x[:, 3] = torch.where(torch.arange(rows) == 2, torch.nan, x[:, 3])
    exact = x.double() @ weight.double() + (bias.double() if has_bias else 0.0)
    given = weight.t().contiguous() if transposed else weight
    with torch.inference_mode():
        found = [linear(x, given, bias if has_bias else None, transposed, relu) for relu in (False, True)]
    for result, expected in zip(found, (exact, torch.relu(exact)), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[1].isnan().sum() == (11 if rows > 2 else 0)


@pytest.mark.skipif(not kernels.available("linear"), reason="needs a C++ compiler for the engine's kernels")
def test_a_small_layer_of_operands_that_do_not_fit_is_refused():
    small = torch.ops.burnish.linear
    with pytest.raises(RuntimeError, match="W that fit expected"):
        small(torch.ones(3, 2), torch.ones(3, 2), None, False, False)
    with pytest.raises(RuntimeError, match="float32 expected"):
        small(torch.ones(3, 2), torch.ones(2, 4, dtype=torch.float64), None, False, False)
    with pytest.raises(RuntimeError, match="one element per column"):
        small(torch.ones(3, 2), torch.ones(2, 4), torch.ones(3), False, False)
