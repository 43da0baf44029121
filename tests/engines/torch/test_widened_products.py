"""Products of sixteen bits where PyTorch's are slow: computed in float32, rounded once, and their operands kept as they are."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.precision import CONVOLUTIONS, PRODUCTS, narrow_dtypes, widen, widened
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.engines.torch.translate.translation import run, translate
from burnish.graph import BURNISH_DOMAIN
from oracles.combinations import diagonal, spread
from oracles.kernel_graphs import kernel_graphs
from oracles.small_networks import batch_of, mobile, perceptron, transformer

CPU = torch.device("cpu")
NARROW = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}

FORMS = {
    "Conv": ("x[2, 32, 9, 9], w[24, 32, 3, 3], b[24]", "y[2, 24, 9, 9]", "y = Conv <pads = [1, 1, 1, 1]> (x, w, b)"),
    "uneven": ("x[2, 32, 9, 9], w[24, 32, 3, 3]", "y[2, 24, 8, 9]", "y = Conv <pads = [0, 1, 1, 1]> (x, w)"),
    "ConvTranspose": ("x[2, 8, 5, 5], w[8, 6, 3, 3]", "y[2, 6, 7, 7]", "y = ConvTranspose (x, w)"),
    "ConvInputGrad": (
        "dy[2, 24, 5, 5], w[24, 32, 3, 3], x[2, 32, 9, 9]",
        "y[2, 32, 9, 9]",
        "y = burnish.ConvInputGrad <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (dy, w, x)",
    ),
    "uneven input": (
        "dy[2, 24, 8, 9], w[24, 32, 3, 3], x[2, 32, 9, 9]",
        "y[2, 32, 9, 9]",
        "y = burnish.ConvInputGrad <kernel_shape = [3, 3], pads = [0, 1, 1, 1]> (dy, w, x)",
    ),
    "ConvWeightGrad": (
        "dy[2, 24, 9, 9], x[2, 32, 9, 9], w[24, 32, 3, 3]",
        "y[24, 32, 3, 3]",
        "y = burnish.ConvWeightGrad <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (dy, x, w)",
    ),
    "MatMul": ("a[3, 70, 90], b[90, 50]", "y[3, 70, 50]", "y = MatMul (a, b)"),
    "Gemm": ("a[90, 70], b[50, 90], c[50]", "y[70, 50]", "y = Gemm <transA = 1, transB = 1, alpha = 0.5> (a, b, c)"),
    "Einsum": ("a[3, 70, 90], b[3, 90, 50]", "y[3, 50, 70]", 'y = Einsum <equation = "bij, bjk -> bki"> (a, b)'),
}


def model_of(operands: str, result: str, nodes: str, dtype: str) -> ir.Model:
    """A graph of one dtype; operands and the result are given as ``name[extents]``."""
    inputs, outputs = (re.sub(r"(\w+)(\[[^]]*\])", rf"{dtype}\2 \1", values) for values in (operands, result))
    header = '<ir_version: 10, opset_import: ["": 22, "burnish": 1]>\n'
    return ir.from_proto(onnx.parser.parse_model(f"{header}agraph ({inputs}) => ({outputs}) {{ {nodes} }}"))


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", FORMS)
def test_a_product_is_rounded_once_from_what_float32_gives(name: str, dtype: str) -> None:
    model = model_of(*FORMS[name], dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        value.name or "": torch.randn(list(value.shape or ()), generator=generator).to(TORCH[dtype])  # type: ignore[arg-type]
        for value in model.graph.inputs
    }
    single = model_of(*FORMS[name], "float")
    expected = run(translate(single, CPU), single, {name: tensor.float() for name, tensor in inputs.items()})["y"]
    widen(model.graph, CONVOLUTIONS | PRODUCTS, [NARROW[dtype]])
    (product,) = (node for node in model.graph if (node.domain, node.op_type) in CONVOLUTIONS | PRODUCTS)
    assert product.outputs[0].dtype == ir.DataType.FLOAT
    found = run(translate(model, CPU), model, inputs)["y"]
    assert found.dtype == TORCH[dtype]
    torch.testing.assert_close(found, expected.to(TORCH[dtype]), rtol=0, atol=0)


def test_other_types_and_operators_stay(dtype: str) -> None:
    other = next(name for name in NARROW if name != dtype)
    for kind in (other, "float", "double"):
        model = model_of(*FORMS["MatMul"], kind)
        widen(model.graph, CONVOLUTIONS | PRODUCTS, [NARROW[dtype]])
        assert [node.op_type for node in model.graph] == ["MatMul"]
    model = model_of("a[3, 4], b[3, 4]", "y[3, 4]", "y = Add (a, b)", dtype)
    widen(model.graph, CONVOLUTIONS | PRODUCTS, [NARROW[dtype]])
    assert [node.op_type for node in model.graph] == ["Add"]


def test_products_side_by_side_share_a_cast_and_distant_ones_do_not(dtype: str) -> None:
    near = model_of("a[4, 4], b[4, 4]", "y[4, 4]", "p = MatMul (a, b) q = MatMul (b, a) y = Add (p, q)", dtype)
    between = " ".join(f"t{step + 1} = Neg (t{step})" for step in range(20))
    far = model_of("a[4, 4], b[4, 4]", "y[4, 4]", f"t0 = MatMul (a, b) {between} q = MatMul (b, a) y = Add (t20, q)", dtype)
    counts = []
    for model in (near, far):
        for node in model.graph:
            node.outputs[0].type = ir.TensorType(NARROW[dtype])
        widen(model.graph, PRODUCTS, [NARROW[dtype]])
        counts.append(sum(node.op_type == "CastApart" for node in model.graph))
    assert counts == [4, 6]


def test_products_in_the_bodies_of_control_operators_are_widened(dtype: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 22]>
agraph (bool c, {dtype}[3, 4] a, {dtype}[4, 3] b) => ({dtype}[3, 3] y) {{
    y = If (c) <
        then_branch = yes () => ({dtype}[3, 3] p) {{ p = MatMul (a, b) }},
        else_branch = no () => ({dtype}[3, 3] q) {{ m = MatMul (a, b) q = Neg (m) }}
    >
}}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    widen(model.graph, PRODUCTS, [NARROW[dtype]])
    products = [node for node in model.graph.all_nodes() if node.op_type == "MatMul"]
    assert [node.outputs[0].dtype for node in products] == [ir.DataType.FLOAT] * 2
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(TORCH[dtype]) for shape in ((3, 4), (4, 3)))
    module = translate(model, CPU)
    for chosen in (True, False):
        y = run(module, model, {"c": torch.tensor(chosen), "a": a, "b": b})["y"]
        exact = (a.float() @ b.float()).to(TORCH[dtype])
        torch.testing.assert_close(y, exact if chosen else -exact, rtol=0, atol=0)


def test_a_model_that_is_loaded_is_not_changed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(*FORMS["MatMul"], dtype)
    monkeypatch.setattr("burnish.engines.torch.bindings.precision.narrow_dtypes", lambda device: {NARROW[dtype]})
    assert [node.op_type for node in widened(model, CPU).graph] == ["CastApart", "CastApart", "MatMul", "CastApart"]
    kind = NARROW[dtype].numpy()
    a, b = np.full((3, 70, 90), 0.5, kind), np.full((90, 50), 3.0, kind)
    y = TorchEngine().run(model, {"a": a, "b": b})["y"]
    assert (y == np.asarray(135.0, kind)).all()
    assert [node.op_type for node in model.graph] == ["MatMul"]
    single = model_of(*FORMS["MatMul"], "float")
    assert widened(single, CPU) is single


@pytest.mark.parametrize(
    ("features", "slow"),
    [
        ("", {"bfloat16", "float16"}),
        ("onednn", {"bfloat16", "float16"}),
        ("onednn avx512", {"bfloat16", "float16"}),
        ("onednn bf16 avx512", {"bfloat16", "float16"}),  # imitated
        ("onednn bf16 avx512 avx512_bf16", {"float16"}),
        ("onednn bf16 fp16 avx512 avx512_bf16", set()),
        ("onednn bf16 fp16", set()),  # AVX-NE-CONVERT, or no x86
        ("onednn bf16", {"float16"}),
    ],
)
def test_what_is_slow_depends_on_the_processor(features: str, slow: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    has = set(features.split())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: "onednn" in has)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: "bf16" in has)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: "fp16" in has)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: "avx512" in has)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512_bf16" in has)
    assert narrow_dtypes(CPU) == {NARROW[name] for name in slow}
    assert not narrow_dtypes(torch.device("cuda"))


NETWORKS: dict[str, Callable[[], ir.Model]] = {
    "residual": lambda: burnish.models.residual_network(width=16, blocks=(1, 1), classes=10, seed=1),
    "transformer": transformer,
    "mobile": mobile,
    "perceptron": perceptron,
}


@pytest.mark.slow
@diagonal(("name", NETWORKS), ("with_kernels", [True, False]))
def test_no_product_of_a_step_is_left_to_slow_loops(name: str, with_kernels: bool, dtype: str) -> None:
    """But depthwise convolutions in bfloat16, which the engine has kernels for."""
    program = burnish.compile(NETWORKS[name](), precision=dtype)
    model = kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | (FUSED if with_kernels else set()))["step"]
    fuse(model, with_kernels, winograd=True, narrow=[NARROW[dtype]])
    slow = [node.op_type for node in model.graph if node.outputs[0].dtype == NARROW[dtype]]
    assert not [kind for kind in slow if ("Conv" in kind and "Depthwise" not in kind) or "MatMul" in kind or "Gemm" in kind]
    assert not [kind for kind in slow if "Linear" in kind or "Product" in kind]


@pytest.mark.slow
@pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")
@spread("name", NETWORKS, test_all=4)
def test_training_is_what_it_is_without(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of some steps, with the products of this processor and with widened ones: both near those of float32."""
    model = NETWORKS[name]()
    losses = []
    for precision, narrow in (("float32", set()), (dtype, set()), (dtype, {NARROW[dtype]})):
        monkeypatch.setattr("burnish.engines.torch.fusion.narrow_dtypes", lambda device, narrow=narrow: narrow)
        session = burnish.Session(burnish.compile(model, precision=precision), "torch", threads=2)
        losses.append([session.step(batch_of(model, seed))["loss"] for seed in range(4)])
    exact, plain, wide = np.array(losses, np.float64)
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert np.abs(wide - exact).max() <= max(2 * np.abs(plain - exact).max(), 4 * unit)
