"""Fused elementwise arithmetic: its functions against float64, what layouts and types it reads, and how fusion groups."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine, kernels
from burnish.engines.torch.fusions.elementwise import fuse_elementwise
from burnish.engines.torch.fusions.elementwise_programs import OPERATIONS

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")
FLOAT, BOOL, BFLOAT16 = 6, 11, 15
FUNCTIONS = {
    "Exp": torch.exp,
    "Log": torch.log,
    "Tanh": torch.tanh,
    "Erf": torch.erf,
    "Sigmoid": torch.sigmoid,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
}


def unary(operation: str, x: torch.Tensor) -> torch.Tensor:
    (y,) = torch.ops.burnish.elementwise([x], [], [OPERATIONS[operation], 1, 0, -1, -1], [FLOAT])
    return y


@needs_kernels
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_keep_all_but_the_last_bit(operation):
    """Over floats of all magnitudes and signs, and more closely where the functions vary."""
    every = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.linspace(-110, 110, 400_001)
    x = torch.cat(
        [every, near, near / 40, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 88.7228394, 88.723])]
    )
    found, exact = unary(operation, x), FUNCTIONS[operation](x.double())
    rounded = exact.float()
    plain = rounded.isfinite()
    assert torch.equal(found.isnan(), rounded.isnan())
    assert torch.equal(found[~plain & ~rounded.isnan()], rounded[~plain & ~rounded.isnan()])
    unit = torch.from_numpy(np.spacing(np.abs(rounded[plain].numpy()))).double()
    errors = (found[plain].double() - exact[plain]).abs() / unit
    assert errors.max().item() < 2.0, x[plain][errors.argmax()]
    assert torch.equal(found[plain].signbit(), rounded[plain].signbit())


def normal(x: torch.Tensor, density: bool) -> torch.Tensor:
    """The standard normal distribution function, or its density, of one or more elements."""
    places = [2, 1] if density else [1, 2]
    program = [OPERATIONS["Normal"], places[0], 0, places[1], -1]
    (y,) = torch.ops.burnish.elementwise([x], [], program, [FLOAT])
    return y


@needs_kernels
def test_the_normal_distribution_keeps_its_digits_far_out():
    """Over floats of all magnitudes and signs, down to where the lower tail has no digits left."""
    every = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.linspace(-15, 15, 400_001)
    x = torch.cat([every, near, near / 15, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 14.5, -14.5])])
    wide = x.double()
    exact = {
        False: torch.special.erfc(-wide * math.sqrt(0.5)) / 2,
        True: torch.exp(-wide * wide / 2) / math.sqrt(2 * math.pi),
    }
    for density, wanted in exact.items():
        found = normal(x, density)
        assert torch.equal(found.isnan(), x.isnan())
        plain = ~x.isnan()
        unit = torch.from_numpy(np.spacing(wanted[plain].float().numpy())).double()
        errors = (found[plain].double() - wanted[plain]).abs() / unit
        tail = (x[plain] < -1) if not density else torch.zeros_like(errors, dtype=torch.bool)
        assert errors[~tail].max().item() < (2.0 if density else 3.5), x[plain][~tail][errors[~tail].argmax()]
        assert not tail.any() or errors[tail].max().item() < 8.0, x[plain][tail][errors[tail].argmax()]
    assert normal(torch.zeros(1), density=False).item() == 0.5


@needs_kernels
@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 255, 257, 1030])
def test_the_normal_distribution_is_the_same_at_every_place(count):
    x = random_tensor((count,), 0) * 3
    for density in (False, True):
        one_by_one = torch.cat([normal(element.reshape(1), density) for element in x])
        assert torch.equal(normal(x, density), one_by_one)
        repeated = [OPERATIONS["Normal"], 4, 0, 3, -1, OPERATIONS["Add"], 2, 1, 3 if density else 4, -1]
        (sums,) = torch.ops.burnish.elementwise([x[:1], torch.zeros(5, count)], [], repeated, [FLOAT])
        assert torch.equal(sums, one_by_one[0].expand(5, count))
    both = [OPERATIONS["Normal"], 1, 0, 2, -1]
    found = torch.ops.burnish.elementwise([x.to(torch.bfloat16)], [], both, [FLOAT, BFLOAT16])
    assert torch.equal(found[0], normal(x.to(torch.bfloat16).float(), density=False))
    assert torch.equal(found[1], normal(x.to(torch.bfloat16).float(), density=True).to(torch.bfloat16))


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [(40,), (30, 40), (1, 40), (7, 1, 1), (7, 30, 1), (30, 1), (7, 1, 40), (1, 30, 1), (1, 1, 1), (1,), ()],
    ids=str,
)
@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
def test_operands_broadcast_from_any_place(shape, layout):
    a = random_tensor((7, 30, 40), 0)
    a = a.permute(2, 0, 1).contiguous().permute(1, 2, 0) if layout == "permuted" else a
    b, c = random_tensor(shape, 1), random_tensor((7, 30, 40), 2)
    (y,) = torch.ops.burnish.elementwise([b, a, c], [], [OPERATIONS["Mul"], 4, 0, 1, -1, OPERATIONS["Sub"], 3, 4, 2, -1], [FLOAT])
    assert torch.equal(y, a * b - c)
    assert y.stride() == a.stride()


@needs_kernels
def test_what_is_expanded_is_not_copied_out_and_may_be_all_there_is():
    row, column = random_tensor((2000,), 0), random_tensor((30, 1), 1)
    sums = torch.ops.burnish.elementwise([row.expand(30, 2000), column], [], [OPERATIONS["Add"], 2, 0, 1, -1], [FLOAT])
    assert torch.equal(sums[0], row + column)


@needs_kernels
def test_masks_select_and_compare():
    x, y = random_tensor((5, 900), 0), random_tensor((5, 900), 1)
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, y[0, 4].item()])
    mask = random_tensor((5, 900), 2) > 0
    comparisons = {"Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Equal": torch.eq}
    for name, function in comparisons.items():
        (found,) = torch.ops.burnish.elementwise([x, y], [], [OPERATIONS[name], 2, 0, 1, -1], [BOOL])
        assert found.dtype == torch.bool
        assert torch.equal(found, function(x, y)), name
    program = [OPERATIONS["Not"], 4, 0, -1, -1, OPERATIONS["Where"], 3, 4, 1, 2]
    (found,) = torch.ops.burnish.elementwise([mask, x, y], [], program, [FLOAT])
    torch.testing.assert_close(found, torch.where(~mask, x, y), rtol=0, atol=0, equal_nan=True)
    for name, both in (("And", torch.logical_and), ("Or", torch.logical_or)):
        (found,) = torch.ops.burnish.elementwise([mask, x > y], [], [OPERATIONS[name], 2, 0, 1, -1], [BOOL])
        assert torch.equal(found, both(mask, x > y))
    (found,) = torch.ops.burnish.elementwise([y, x], [], [OPERATIONS["ReluGrad"], 2, 0, 1, -1], [FLOAT])
    torch.testing.assert_close(found, torch.ops.aten.threshold_backward(y, x, 0), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("count", [1, 7, 259, 1030])
@pytest.mark.parametrize("repeated", [(), (0,), (1, 2)])
def test_what_is_joined_with_a_product_rounds_as_the_operations_do_one_by_one(count, repeated):
    a, b, c = (random_tensor((1 if place in repeated else count,), place) for place in range(3))
    expected = {"MulAdd": a * b + c, "MulSub": a * b - c, "SubMul": c - a * b}
    for name, wanted in expected.items():
        (found,) = torch.ops.burnish.elementwise([a, b, c], [], [OPERATIONS[name], 3, 0, 1, 2], [FLOAT])
        assert torch.equal(found, wanted), name


@needs_kernels
def test_bfloat16_is_computed_in_float32_and_rounded_as_pytorch_rounds():
    every = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scale = random_tensor((1,), 0).item()
    program = [OPERATIONS["Mul"], 3, 0, 1, -1, OPERATIONS["Copy"], 2, 3, -1, -1]
    (found,) = torch.ops.burnish.elementwise([every], [scale], program, [BFLOAT16])
    expected = (every.float() * scale).to(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    wide = torch.arange(-(2**31), 2**31, 8191, dtype=torch.int64).to(torch.int32).view(torch.float32)
    (found,) = torch.ops.burnish.elementwise([wide], [], [OPERATIONS["Copy"], 1, 0, -1, -1], [BFLOAT16])
    torch.testing.assert_close(found, wide.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    image = random_tensor((2, 8, 9, 10), 1).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    bias = random_tensor((1, 8, 1, 1), 2).to(torch.bfloat16)
    (found,) = torch.ops.burnish.elementwise([image, bias], [], [OPERATIONS["Add"], 2, 0, 1, -1], [BFLOAT16])
    assert torch.equal(found, image + bias)


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
@pytest.mark.parametrize("seed", range(12))
def test_graphs_drawn_at_random_compute_the_same(seed):
    """Nodes that read any two values made before, with passes of another kind among them that groups may not reach around."""
    generator = np.random.default_rng(seed)
    lines, names = [], ["a", "b", "c"]
    for index in range(70):
        one, other = generator.choice(names[-12:], 2)
        kind = generator.choice(
            ["Add", "Sub", "Mul", "Max", "Min", "Tanh", "Sigmoid", "Softmax"], p=[0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.15]
        )
        operands = one if kind in ("Tanh", "Sigmoid", "Softmax") else f"{one}, {other}"
        lines.append(f"v{index} = {kind} ({operands})")
        names.append(f"v{index}")
    outputs = ["v69", *(f"v{index}" for index in range(0, 69, 9))]
    shape = "float[batch, 3, 400]"
    text = (
        '<ir_version: 10, opset_import: ["": 18]>\n'
        f"graph ({shape} a, {shape} b, float[3, 1] c) => ({', '.join(f'{shape} {name}' for name in outputs)}) {{\n"
        + "\n".join(lines)
        + "\n}"
    )
    plain, model = fused(text)
    assert len(kinds(model)) < len(kinds(plain)) - 20
    inputs = {
        "a": generator.normal(size=(2, 3, 400)),
        "b": generator.normal(size=(2, 3, 400)),
        "c": generator.normal(size=(3, 1)),
    }
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    found, wanted = (TorchEngine().run(graph, inputs) for graph in (model, plain))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@needs_kernels
def test_an_adaptive_optimizer_updates_a_parameter_in_one_call():
    from burnish.engines.torch.fusions import FUSED, fuse
    from burnish.engines.torch.rules import translated_operators
    from burnish.graph import BURNISH_DOMAIN
    from burnish.models import residual_network

    program = burnish.compile(residual_network(), optimizer="adamw")
    model = fuse(program.kernel_graphs(translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True)
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


def within_float32(found: torch.Tensor, terms: torch.Tensor, axes: list[int]) -> bool:
    """Whether sums of float64 terms are as near as their rounding, and that of sums of sixteen, lets them be."""
    bound = 2.0**-24 * (16 * terms.abs().sum(axes) / 4 + terms.sum(axes).abs()) + 1e-45
    return bool(((found.double() - terms.sum(axes)).abs() <= bound).all())


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "kept"),
    [((1,), 0), ((7,), 0), ((3, 5), 1), ((1, 300), 1), ((33, 300), 1), ((9, 128, 48), 1), ((1000, 17), 1), ((40, 6, 50), 2)],
    ids=str,
)
def test_sums_over_leading_axes_are_of_unrounded_values(shape, kept, threads):
    x, scale = (random_tensor(shape, place).to(torch.bfloat16) for place in range(2))
    terms, axes = x.double() * scale.double(), list(range(len(shape) - kept))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        program = [OPERATIONS["Mul"], 2, 0, 1, -1]
        y, products, first = torch.ops.burnish.elementwise_sums([x, scale], [], program, [BFLOAT16], [2, 0], kept)
        (alone,) = torch.ops.burnish.elementwise_sums([x, scale], [], program, [], [2], kept)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(y, (x.float() * scale.float()).to(torch.bfloat16))
    assert products.dtype == first.dtype == torch.float32
    assert products.shape == shape[len(shape) - kept :]
    assert within_float32(products, terms, axes)
    assert within_float32(first, x.double(), axes)
    assert torch.equal(products, alone)


@needs_kernels
def test_sums_do_not_depend_on_threads_or_the_order_of_memory_and_keep_what_is_not_finite():
    x, row = random_tensor((70, 30, 40), 0), random_tensor((40,), 1)
    x[1, 2, 3], x[3, 4, 5], x[4, 5, 6], x[6, 7, 6] = math.nan, math.inf, math.inf, -math.inf
    program = [OPERATIONS["Add"], 2, 0, 1, -1]
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for given in (x, x.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
                y, sums = torch.ops.burnish.elementwise_sums([given, row], [], program, [FLOAT], [2], 1)
                torch.testing.assert_close(y, x + row, rtol=0, atol=0, equal_nan=True)
                found.append(sums)
    finally:
        torch.set_num_threads(before)
    for sums in found:
        torch.testing.assert_close(sums, found[0], rtol=0, atol=0, equal_nan=True)
    assert found[0][[3, 6]].isnan().all()
    assert found[0][5] == math.inf
    plain = torch.ones(40, dtype=torch.bool)
    plain[3], plain[5], plain[6] = False, False, False
    assert within_float32(found[0][plain], (x + row).double()[..., plain], [0, 1])


@needs_kernels
def test_sums_of_nothing_are_zero_and_what_repeats_is_added_as_often_as_it_stands_there():
    for shape in ((0, 30), (4, 0), (0, 0)):
        y, sums = torch.ops.burnish.elementwise_sums([torch.empty(shape)], [], [OPERATIONS["Neg"], 1, 0, -1, -1], [FLOAT], [1], 1)
        assert y.shape == shape
        assert torch.equal(sums, torch.zeros(shape[1]))
    one, row = torch.full((1,), 0.5), random_tensor((1, 300), 0)
    sums = torch.ops.burnish.elementwise_sums([one, row, torch.ones(64, 1)], [], [], [], [0, 1, 2], 1)
    assert torch.equal(sums[0], torch.full((300,), 32.0))
    torch.testing.assert_close(sums[1], row[0] * 64, rtol=1e-6, atol=0)
    assert torch.equal(sums[2], torch.full((300,), 64.0))


@needs_kernels
def test_sums_name_what_is_wrong_with_their_operands():
    x = torch.ones(3, 4)
    for summed, kept, message in (([5], 1, "no register 5"), ([0], 3, "no 3 axes to keep"), ([-1], 1, "no register -1")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.burnish.elementwise_sums([x], [], [], [], summed, kept)


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
