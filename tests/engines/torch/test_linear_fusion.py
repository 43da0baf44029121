"""Products with a weight as one kernel: what is recognized, what is not, and the digits of values and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch.fusions.linear import fuse_linear
from burnish.engines.torch.products import linear, linear_weight_gradient
from burnish.engines.torch.translation import run, translate

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
    fuse_linear(model.graph)
    model.opset_imports.setdefault("burnish", 1)
    return sorted(node.op_type for node in model.graph if node.op_type != "Constant")


def computed(model: ir.Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    module = translate(model, torch.device("cpu"))
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return {name: tensor.numpy() for name, tensor in run(module, model, tensors).items()}


@pytest.mark.parametrize("text", [LINEAR, GEMM])
@pytest.mark.parametrize(("rows", "k", "n"), [(3, 7, 11), (1, 1, 1), (0, 4, 3), (64, 700, 130), (130, 520, 300), (130, 300, 520)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_and_its_gradients_keep_their_digits(text, rows, k, n, threads):
    model = burnish.grad(onnx.parser.parse_model(HEADER + text.format(k=k, n=n)), wrt=["x", "w", "b"], of="y")
    kinds = fused(model)
    assert kinds.count("FusedLinear") == 2
    assert kinds.count("FusedLinearWeightGrad") == 1
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
        y = linear(one, other, None, True).numpy()
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
