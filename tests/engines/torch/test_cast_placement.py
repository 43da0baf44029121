"""Casts that are moved: in front of what reads a shape, and beside transpositions, where linear layers are then found."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.precision import read_shapes_before_casts, transpose_narrow
from burnish.engines.torch.translate.translation import run, translate
from burnish.kernels.linear import fuse_linear, use_linear_gradients
from oracles.semantic_gradients import semantic_gradients

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")
HEADER = '<ir_version: 10, opset_import: ["": 22]>\n'


def parsed(text: str) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def kinds(model: ir.Model) -> list[str]:
    return sorted(node.op_type for node in model.graph if node.op_type != "Constant")


def computed(model: ir.Model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.opset_imports.setdefault("burnish", 1)
    return run(translate(model, torch.device("cpu")), model, inputs)


def test_shapes_are_read_in_front_of_casts():
    model = parsed(
        """graph (bfloat16[batch, 3] x) => (int64[2] shape) {
    wide = Cast <to = 1> (x)
    again = Cast <to = 11> (wide)
    shape = Shape (again)
}"""
    )
    read_shapes_before_casts(model.graph)
    (shape,) = (node for node in model.graph if node.op_type == "Shape")
    assert shape.inputs[0] is model.graph.inputs[0]
    assert computed(model, {"x": torch.zeros(4, 3).bfloat16()})["shape"].tolist() == [4, 3]


WEIGHT = """graph (float[5, 7] w) => (bfloat16[7, 5] y) {
    t = Transpose <perm = [1, 0]> (w)
    y = Cast <to = 16> (t)
}"""
GRADIENT = """graph (bfloat16[5, 7] w) => (float[7, 5] y) {
    c = Cast <to = 1> (w)
    y = Transpose <perm = [1, 0]> (c)
}"""


@pytest.mark.parametrize(("text", "order"), [(WEIGHT, ["Cast", "Transpose"]), (GRADIENT, ["Transpose", "Cast"])])
def test_matrices_are_transposed_in_bfloat16(text, order):
    model = parsed(text)
    transpose_narrow(model.graph)
    assert [node.op_type for node in model.graph] == order
    assert model.graph.outputs[0].name == "y"
    w = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    given = w if text is WEIGHT else w.bfloat16()
    expected = given.t().to(torch.bfloat16 if text is WEIGHT else torch.float32)
    assert torch.equal(computed(model, {"w": given})["y"], expected)


@pytest.mark.parametrize(
    "text",
    [
        # The float32 transposed matrix is wanted, too.
        "graph (float[5, 7] w) => (bfloat16[7, 5] y, float[7, 5] t) { t = Transpose (w)\n y = Cast <to = 16> (t) }",
        "graph (float[2, 5, 7] w) => (bfloat16[7, 5, 2] y) { t = Transpose (w)\n y = Cast <to = 16> (t) }",
        "graph (float[5, 7] w) => (bfloat16[7, 5] y) { c = Cast <to = 16> (w)\n y = Transpose (c) }",
        "graph (float[5, 7] w) => (int64[7, 5] y) { t = Transpose (w)\n y = Cast <to = 7> (t) }",
        "graph (float[5, 7] w) => (bfloat16[5, 7] y) { t = Transpose <perm = [0, 1]> (w)\n y = Cast <to = 16> (t) }",
        "graph (float[5, 7] w) => (bfloat16[5, 7] y) { c = Constant <value = float[5, 7] {" + ", ".join(["1"] * 35) + "}> ()\n"
        " y = Cast <to = 16> (c) }",
    ],
)
def test_other_transpositions_stay(text):
    model = parsed(text)
    before = [node.op_type for node in model.graph]
    transpose_narrow(model.graph)
    assert [node.op_type for node in model.graph] == before


LAYER = """graph (bfloat16[batch, 3, {k}] x, float[{n}, {k}] w, float[{n}] b) => (bfloat16[batch, 3, {n}] y) {{
    t = Transpose <perm = [1, 0]> (w)
    m = Cast <to = 16> (t)
    c = Cast <to = 16> (b)
    p = MatMul (x, m)
    y = Add (c, p)
}}"""


@needs_kernels
@pytest.mark.parametrize(("rows", "k", "n"), [(2, 7, 11), (30, 520, 300), (1, 1, 1)])
def test_linear_layers_of_bfloat16_are_one_product_and_their_gradients_one_call(rows, k, n, monkeypatch):
    # As mixed precision has it: of a model in bfloat16 the gradient is computed in float32.
    monkeypatch.setattr("burnish.compiler.gradient.has_sixteen_bit_values", lambda model: False)
    model = semantic_gradients(parsed(LAYER.format(k=k, n=n)), wrt=["w"], of="y")
    transpose_narrow(model.graph)
    use_linear_gradients(model.graph)
    fuse_linear(model.graph)
    assert kinds(model) == ["Cast", "Cast", "Cast", "FusedLinear", "FusedLinearGrad"]
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(rows, 3, k, generator=generator).bfloat16()
    w, b = torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)
    dy = torch.randn(rows, 3, n, generator=generator).bfloat16()
    found = computed(model, {"x": x, "w": w, "b": b, "cotangent:y": dy})
    narrow, flat = w.bfloat16().double(), x.reshape(-1, k).double()
    exact = {"y": x.double() @ narrow.t() + b.bfloat16().double(), "grad:w": dy.double().reshape(-1, n).t() @ flat}
    for name, dtype in {"y": torch.bfloat16, "grad:w": torch.float32}.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name].double(), exact[name], rtol=2**-8, atol=1e-5 * exact[name].abs().max().item())
