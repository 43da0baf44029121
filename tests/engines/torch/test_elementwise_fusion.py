"""Fusion of elementwise arithmetic: what becomes a chain, what is added up in it, and what it computes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.kernels.elementwise import fusion as elementwise
from burnish.kernels.elementwise.fusion import fuse_elementwise
from burnish.kernels.elementwise.programs import OPERATIONS
from oracles.combinations import diagonal, named
from oracles.float32_sums import within_float32
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fused(text: str) -> tuple[ir.Model, ir.Model]:
    """A model before and after fusion."""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    plain = model.clone()
    fuse_elementwise(model.graph)
    return plain, model


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type not in ("Constant", "Identity")]


GELU_GRADIENT = """
<ir_version: 10, opset_import: ["": 20]>
graph (float[batch, 20, 64] h, float[64] bias, float[batch, 20, 64] dy, float[batch, 20, 1] weight)
    => (float[batch, 20, 64] y, float[batch, 20, 64] dx) {
    one = Constant <value_float = 1.0> ()
    half = Constant <value = float[1] {0.5}> ()
    root = Constant <value_float = 0.70710677> ()
    density = Constant <value_float = 0.3989423> ()
    two = Constant <value_int = 2> ()
    x = Add (h, bias)
    y = Gelu (x)
    s = Mul (x, root)
    e = Erf (s)
    f = Add (e, one)
    cdf = Mul (f, half)
    square = Pow (x, two)
    negative = Neg (square)
    exponent = Mul (negative, half)
    bell = Exp (exponent)
    pdf = Mul (bell, density)
    slope = Mul (x, pdf)
    total = Add (cdf, slope)
    flow = Mul (dy, weight)
    dx = Mul (flow, total)
}"""

GELU = (
    GELU_GRADIENT[: GELU_GRADIENT.index("=> (")]
    + """=> (float[batch, 20, 64] y, float[batch, 20, 64] dx) {
    one = Constant <value_float = 1.0> ()
    half = Constant <value = float[1] {0.5}> ()
    root = Constant <value_float = 1.4142135> ()
    density = Constant <value_float = 0.3989423> ()
    negative_half = Constant <value_float = -0.5> ()
    x = Add (h, bias)
    s = Div (x, root)
    e = Erf (s)
    f = Add (one, e)
    product = Mul (x, f)
    y = Mul (product, half)
    square = Mul (x, x)
    exponent = Mul (negative_half, square)
    bell = Exp (exponent)
    pdf = Mul (density, bell)
    slope = Mul (x, pdf)
    cdf = Mul (half, f)
    total = Add (cdf, slope)
    dx = Mul (dy, total)
}"""
)
"""GELU as exporters write it out, and its gradient."""

DROPOUT = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 4, 300] x, float[batch, 4, 300] drawn, float ratio) => (float[batch, 4, 300] y, bool[batch, 4, 300] mask) {
    zero = Constant <value_float = 0.0> ()
    six = Constant <value_float = 6.0> ()
    one = Constant <value_float = 1.0> ()
    keep = Sub (one, ratio)
    mask = GreaterOrEqual (drawn, ratio)
    scaled = Div (x, keep)
    chosen = Where (mask, scaled, zero)
    y = Clip (chosen, zero, six)
}"""


@needs_kernels
@pytest.mark.parametrize(("text", "expected"), [(GELU_GRADIENT, ["FusedElementwise"]), (DROPOUT, ["Sub", "FusedElementwise"])])
def test_chains_of_functions_become_single_passes(text, expected):
    plain, model = fused(text)
    assert kinds(model) == expected
    generator = np.random.default_rng(0)
    inputs = {}
    for value in model.graph.inputs:
        shape = [extent if isinstance(extent, int) else 3 for extent in value.shape.dims]
        inputs[value.name] = generator.normal(size=shape).astype(np.float32)
    if "ratio" in inputs:
        inputs["ratio"] = np.float32(0.25)
    engine = TorchEngine()
    found, wanted = (engine.run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=1e-6, err_msg=name)


@needs_kernels
@pytest.mark.parametrize("text", [GELU_GRADIENT, GELU], ids=["operator", "pieces"])
def test_gelu_and_its_gradient_share_one_evaluation_and_keep_their_digits_where_they_vanish(text):
    _, model = fused(text)
    (node,) = [node for node in model.graph if node.op_type == "FusedElementwise"]
    program = list(node.attributes["program"].as_ints())
    assert program[::5].count(OPERATIONS["Normal"]) == 1
    assert not {OPERATIONS["Erf"], OPERATIONS["Exp"]}.intersection(program[::5])
    x = np.linspace(-12, 12, 3 * 20 * 64, dtype=np.float32).reshape(3, 20, 64)
    inputs = {"h": x, "bias": np.zeros(64, np.float32), "dy": np.ones_like(x), "weight": np.ones((3, 20, 1), np.float32)}
    found = TorchEngine().run(model, inputs)
    wide = torch.from_numpy(x).double()
    distribution = torch.special.erfc(-wide * math.sqrt(0.5)) / 2
    slope = wide * torch.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(found["y"], wide * distribution, rtol=6e-7)
    # Terms of both signs nearly cancel beside the minimum.
    error = np.abs(found["dx"] - (distribution + slope).numpy())
    assert (error <= 3e-7 * (distribution.abs() + slope.abs()).numpy()).all()


def test_a_function_that_is_no_part_of_gelu_stays_as_it_is():
    """Another constant in any place, or a square of something else."""
    for old, new in (("0.70710677", "0.7071"), ("0.3989423", "0.39894"), ("Pow (x, two)", "Mul (x, dy)")):
        _, model = fused(GELU_GRADIENT.replace(old, new).replace("y = Gelu (x)", "y = Relu (x)"))
        (node,) = [node for node in model.graph if node.op_type == "FusedElementwise"]
        program = list(node.attributes["program"].as_ints())[::5]
        assert (OPERATIONS["Erf"] in program) != (OPERATIONS["Exp"] in program)


CROSSING = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 40, 30] a, float[batch, 40, 30] b) => (float[batch, 40, 30] y, float[batch, 40, 30] z) {
    p = Mul (a, a)
    q = Add (b, b)
    ps = Softmax <axis = -1> (p)
    qs = Softmax <axis = -1> (q)
    u = Add (p, qs)
    v = Sub (q, ps)
    y = Mul (u, v)
    z = Div (v, u)
}"""


@needs_kernels
def test_groups_never_wait_for_each_other():
    plain, model = fused(CROSSING)
    assert kinds(model).count("Softmax") == 2
    generator = np.random.default_rng(0)
    inputs = {name: generator.normal(size=(5, 40, 30)).astype(np.float32) for name in "ab"}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)


@needs_kernels
@diagonal(
    ("seed", range(12)),
    (
        ("segment", "long", "recent"),
        named([(elementwise.SEGMENT, elementwise.LONG, 12), (9, 6, 40)], ["one segment", "segments"]),
    ),
    test=10,
)
def test_graphs_drawn_at_random_compute_the_same(seed, segment, long, recent, monkeypatch):
    """Nodes that read any two values made before, with passes of another kind among them that groups may not reach around."""
    monkeypatch.setattr(elementwise, "SEGMENT", segment)
    monkeypatch.setattr(elementwise, "LONG", long)
    generator = np.random.default_rng(seed)
    lines, names, whole = [], ["a", "b", "c"], {"a", "b"}
    for index in range(70):
        one, other = generator.choice(["a", "b", *names[-recent:]], 2)
        kind = generator.choice(
            ["Add", "Sub", "Mul", "Max", "Min", "Tanh", "Sigmoid", "Softmax"], p=[0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.15]
        )
        operands = one if kind in ("Tanh", "Sigmoid", "Softmax") else f"{one}, {other}"
        lines.append(f"v{index} = {kind} ({operands})")
        names.append(f"v{index}")
        if whole & {one, *([] if operands == one else [other])}:
            whole.add(names[-1])
    outputs = [name for name in names[3:] if name in whole][::-9]
    shape = "float[batch, 3, 400]"
    text = (
        '<ir_version: 10, opset_import: ["": 18]>\n'
        f"graph ({shape} a, {shape} b, float[3, 1] c) => ({', '.join(f'{shape} {name}' for name in outputs)}) {{\n"
        + "\n".join(lines)
        + "\n}"
    )
    plain, model = fused(text)
    assert len(kinds(model)) <= len(kinds(plain)) - (20 if recent == 12 else 0)
    inputs = {
        "a": generator.normal(size=(2, 3, 400)),
        "b": generator.normal(size=(2, 3, 400)),
        "c": generator.normal(size=(3, 1)),
    }
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@needs_kernels
def test_an_adaptive_optimizer_updates_a_parameter_in_one_call():
    from burnish.engines.torch.fusion import FUSED, fuse
    from burnish.engines.torch.translate.rules import translated_operators
    from burnish.graph import BURNISH_DOMAIN
    from burnish.models import residual_network

    program = burnish.compile(residual_network(), optimizer="adamw")
    model = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True)
    for value in model.graph.outputs:
        if (value.name or "").startswith("next:param/"):
            maker = value.producer()
            assert maker is not None
            assert maker.op_type == "FusedElementwise"
            written = {output.name for output in maker.outputs}
            parameter = (value.name or "").removeprefix("next:param/")
            assert {f"next:opt/first_moment/{parameter}", f"next:opt/second_moment/{parameter}"} <= written


def activated(between: int, kind: str = "Gelu", more: str = "") -> str:
    """A layer with an activation whose gradient runs ``between`` nodes later, and then the gradient of the weight behind it."""
    lines = "\n".join(f"w{i + 1} = Softmax <axis = -1> (w{i})" for i in range(between))
    return f"""
<ir_version: 10, opset_import: ["": 20]>
graph (float[batch, 20, 64] x, float[batch, 20, 64] w0) => (float[batch, 20, 64] dx, float[batch, 64, 64] dw) {{
    one = Constant <value_float = 1.0> ()
    root = Constant <value_float = 0.70710678> ()
    y = {kind} (x)
    s = Softmax <axis = -1> (y)
    {lines}
    dy = Mul (w{between}, s)
    scaled = Mul (x, root)
    e = Erf (scaled)
    f = Add (e, one)
    dx = Mul (dy, f)
    {more}
    t = Transpose <perm = [0, 2, 1]> (y)
    dw = MatMul (t, w{between})
}}"""


@needs_kernels
def test_an_activation_that_is_read_much_later_is_computed_again_beside_its_gradient():
    plain, model = fused(activated(40))
    (late,) = [node for node in model.graph if node.op_type == "FusedElementwise"]
    (transposed,) = [node for node in model.graph if node.op_type == "Transpose"]
    assert transposed.inputs[0].producer() is late
    (early,) = [node for node in model.graph if node.op_type == "Gelu"]
    assert [user.op_type for user, _ in early.outputs[0].uses()] == ["Softmax"]
    program = list(late.attributes["program"].as_ints())
    assert program[::5].count(OPERATIONS["Normal"]) == 1  # shared with the gradient
    assert OPERATIONS["Erf"] not in program[::5]
    generator = np.random.default_rng(0)
    inputs = {name: generator.normal(size=(3, 20, 64)).astype(np.float32) for name in ("x", "w0")}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=1e-6, err_msg=name)


@needs_kernels
@pytest.mark.parametrize(
    ("between", "more"),
    [(3, ""), (40, "y2 = Softmax <axis = -1> (y)\n dz = Mul (y2, x)")],
    ids=["read soon", "a group waits for it"],
)
def test_an_activation_is_kept_where_it_is_read_soon_or_a_group_that_could_compute_it_waits_for_it(between, more):
    text = activated(between, more=more)
    if more:
        text = text.replace("dx = Mul (dy, f)", "flow = Mul (dy, f)\n dx = Mul (flow, dz)").replace(more, "")
        text = text.replace("dy = Mul", more + "\n    dy = Mul")
    _, model = fused(text)
    (transposed,) = [node for node in model.graph if node.op_type == "Transpose"]
    assert transposed.inputs[0].producer().op_type == "Gelu"


@needs_kernels
def test_values_that_are_the_same_are_computed_once_and_may_both_be_results():
    text = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 20, 64] x) => (float[batch, 20, 64] y, float[batch, 20, 64] z, float[batch, 20, 64] u) {
    a = Exp (x)
    b = Exp (x)
    y = Mul (a, x)
    z = Mul (b, x)
    u = Add (y, z)
}"""
    plain, model = fused(text)
    (node,) = [node for node in model.graph if node.op_type == "FusedElementwise"]
    assert list(node.attributes["program"].as_ints())[::5].count(OPERATIONS["Exp"]) == 1
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 20, 64)).astype(np.float32)}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=1e-6, err_msg=name)


@needs_kernels
def test_a_product_is_joined_with_the_sum_or_difference_that_alone_reads_it():
    text = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 20, 64] a, float[batch, 20, 64] b, float[batch, 20, 64] c)
    => (float[batch, 20, 64] r, float[batch, 20, 64] w, float[batch, 20, 64] z) {
    p = Mul (a, b)
    q = Add (c, p)
    r = Mul (b, q)
    s = Sub (r, c)
    t = Mul (s, a)
    u = Sub (b, t)
    v = Mul (u, u)
    w = Add (v, v)
    x = Mul (a, c)
    y = Mul (c, s)
    z = Sub (x, y)
}"""
    plain, model = fused(text)
    (node,) = [node for node in model.graph if node.op_type == "FusedElementwise"]
    program = list(node.attributes["program"].as_ints())
    names = {number: name for name, number in OPERATIONS.items()}
    # r is a result, and v is read twice.
    operations = [names[operation] for operation in program[::5]]
    assert sorted(operations) == sorted(["MulAdd", "Mul", "Sub", "SubMul", "Mul", "Add", "Mul", "MulSub"])
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=(3, 20, 64)).astype(np.float32) for name in "abc"}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def bias_gradient(axes: str = "0, 1", more: str = "", keepdims: int = 0) -> str:
    """A gradient in bfloat16 that is rounded for a product, and added up before for a bias."""
    return f"""
<ir_version: 10, opset_import: ["": 18]>
graph (bfloat16[batch, 30, 64] dy, float[batch, 30, 64] slope) => (bfloat16[batch, 30, 64] dx, float[sum] db, float[out] other) {{
    axes = Constant <value_ints = [{axes}]> ()
    wide = Cast <to = 1> (dy)
    flow = Mul (wide, slope)
    narrow = Cast <to = 16> (flow)
    dx = Transpose <perm = [0, 1, 2]> (narrow)
    db = ReduceSum <keepdims = {keepdims}> (flow, axes)
    {more or "other = ReduceSum <keepdims = 0> (slope, axes)"}
}}"""


@needs_kernels
def test_a_sum_that_alone_reads_a_value_is_computed_with_it():
    plain, model = fused(bias_gradient())
    assert kinds(model) == ["FusedElementwiseSums", "Transpose", "ReduceSum"]
    generator = np.random.default_rng(0)
    dy = torch.from_numpy(generator.normal(size=(50, 30, 64)).astype(np.float32)).to(torch.bfloat16)
    inputs = {
        "dy": dy.float().numpy().astype(ml_dtypes.bfloat16),
        "slope": generator.normal(size=(50, 30, 64)).astype(np.float32),
    }
    engine = TorchEngine()
    found, wanted = (engine.run(graph, inputs) for graph in (model, plain))
    np.testing.assert_array_equal(found["dx"], wanted["dx"])
    terms = (dy.float() * torch.from_numpy(inputs["slope"])).double()
    assert within_float32(torch.from_numpy(found["db"]), terms, [0, 1])


@needs_kernels
@pytest.mark.parametrize(
    "text",
    [
        bias_gradient(axes="0, 2"),
        bias_gradient(axes="2"),
        bias_gradient(axes="0, 1, 2"),
        bias_gradient(keepdims=1),
        bias_gradient(more="other = Softmax <axis = -1> (flow)"),
        bias_gradient().replace("30, 64", "width, 8").replace("batch", "30"),
    ],
    ids=["not leading", "last", "all", "kept axes", "value read beside", "few columns"],
)
def test_other_sums_stay_apart(text):
    _, model = fused(text)
    assert "FusedElementwiseSums" not in kinds(model)
    assert "ReduceSum" in kinds(model)


@needs_kernels
def test_a_cast_that_is_only_added_up_is_not_written():
    text = """
<ir_version: 10, opset_import: ["": 18]>
graph (bfloat16[batch, 30, 64] dy) => (float[64] db) {
    axes = Constant <value_ints = [0, -2]> ()
    wide = Cast <to = 1> (dy)
    db = ReduceSum <keepdims = 0> (wide, axes)
}"""
    _, model = fused(text)
    assert kinds(model) == ["FusedElementwiseSums"]
    dy = random_tensor((50, 30, 64), 0).to(torch.bfloat16)
    found = TorchEngine().run(model, {"dy": dy.float().numpy().astype(ml_dtypes.bfloat16)})
    assert within_float32(torch.from_numpy(found["db"]), dy.double(), [0, 1])
