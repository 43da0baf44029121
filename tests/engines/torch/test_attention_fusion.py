"""Attention without its probabilities: results and gradients against float64, and which graphs take it."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.attention import attention, attention_gradient
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.engines.torch.translate.translation import run, translate
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.attention import fuse_attention
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.rewriting.recognize_attention import recognize_attention
from oracles.kernel_graphs import kernel_graphs
from oracles.rewritten import rewritten
from oracles.semantic_gradients import semantic_gradients
from oracles.small_networks import transformer

needs_kernels = pytest.mark.skipif(not kernels.available("elementwise"), reason="needs a C++ compiler for the fused kernels")

DTYPES = [torch.float32, torch.bfloat16]
HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
HEADS = "float[batch, 3, 20, 8] q, float[batch, 3, 40, 8] k, float[batch, 3, 40, 8] v"
FORMS = {
    "both operands scaled": """
        s = Constant <value = float {0.59}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        qs = Mul (q, s)
        ts = Mul (t, s)
        scores = MatMul (qs, ts)""",
    "scores divided": """
        s = Constant <value = float {2.83}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        plain = MatMul (q, t)
        scores = Div (plain, s)""",
    "not scaled": """
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        scores = MatMul (q, t)""",
}
MASKS = {"": None, "[batch, 1, 1, 40]": (2, 1, 1, 40), "[20, 40]": (20, 40), "[batch, 3, 20, 40]": (2, 3, 20, 40)}


def model_of(form: str, mask: str = "", tail: str = "y = MatMul (p, v)", outputs: str = "float[batch, 3, 20, 8] y") -> ir.Model:
    given = f"{HEADS}, float{mask} m" if mask else HEADS
    masked = "masked = Add (scores, m)\n p = Softmax <axis = -1> (masked)" if mask else "p = Softmax <axis = -1> (scores)"
    return burnish.load(onnx.parser.parse_model(f"{HEADER}graph ({given}) => ({outputs}) {{{FORMS[form]}\n{masked}\n{tail}\n}}"))


def fused(model: ir.Model) -> ir.Model:
    recognize_attention(model)
    fuse_attention(model.graph)
    model.opset_imports.setdefault("burnish", 1)
    return model


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_attention_and_its_gradient_are_a_kernel_each_and_keep_their_digits(form, mask):
    plain = burnish.grad(model_of(form, mask), wrt=["q", "k", "v"], of="y")
    model = fused(semantic_gradients(model_of(form, mask), wrt=["q", "k", "v"], of="y"))
    assert {"FusedAttention", "FusedAttentionGrad"} <= set(kinds(model))
    assert not {"MatMul", "Softmax", "SoftmaxGrad", "Mul", "Div"} & set(kinds(model))
    inputs = {"q": drawn((2, 3, 20, 8), 0), "k": drawn((2, 3, 40, 8), 1), "v": drawn((2, 3, 40, 8), 2)}
    if mask:
        inputs["m"] = drawn(MASKS[mask], 3)
    inputs["cotangent:y"] = drawn((2, 3, 20, 8), 4)
    found = run(translate(model, torch.device("cpu")), model, inputs)
    expected = run(translate(plain, torch.device("cpu")), plain, inputs)
    scale = {"both operands scaled": 0.59**2, "scores divided": 1 / 2.83, "not scaled": 1.0}[form]
    wide = {name: tensor.double().requires_grad_(name in "qkv") for name, tensor in inputs.items()}
    scores = wide["q"] @ wide["k"].transpose(2, 3) * scale
    y = torch.softmax(scores + wide["m"] if mask else scores, -1) @ wide["v"]
    gradients = torch.autograd.grad(y, [wide[name] for name in "qkv"], wide["cotangent:y"])
    exact = {"y": y.detach(), **{f"grad:{name}": gradient for name, gradient in zip("qkv", gradients, strict=True)}}
    for name, value in exact.items():
        error, usual = (float((tensor.double() - value).norm() / value.norm()) for tensor in (found[name], expected[name]))
        assert error <= 2 * usual + 1e-7, name


@pytest.mark.parametrize("form", FORMS)
def test_attention_without_a_gradient_is_one_kernel(form):
    model = fused(model_of(form))
    assert kinds(model).count("FusedAttention") == 1
    assert "Softmax" not in kinds(model)


@pytest.mark.parametrize(
    ("tail", "outputs"),
    [
        ("y = MatMul (p, v)", "float[batch, 3, 20, 8] y, float[batch, 3, 20, 40] p"),
        ("y = MatMul (p, v)\n l = Log (p)\n z = ReduceSum <keepdims = 0> (l)", "float[batch, 3, 20, 8] y, float z"),
        ("d = Relu (p)\n y = MatMul (d, v)", "float[batch, 3, 20, 8] y"),
    ],
    ids=["an output", "read elsewhere", "changed before the product"],
)
def test_probabilities_that_something_else_reads_are_computed(tail, outputs):
    model = fused(semantic_gradients(model_of("not scaled", tail=tail, outputs=outputs), wrt=["q"], of="y"))
    assert "FusedAttention" not in kinds(model)


def test_the_gradient_of_a_mask_needs_the_probabilities():
    model = fused(semantic_gradients(model_of("scores divided", "[20, 40]"), wrt=["q", "m"], of="y"))
    assert "FusedAttention" not in kinds(model)


def test_what_reads_the_gradient_of_a_scaled_operand_is_kept():
    source = model_of("both operands scaled")
    model = semantic_gradients(source, wrt=["q", "k", "v"], of="y")
    (product,) = [node for node in model.graph if node.op_type == "Mul" and node.outputs[0].name == "grad:q"]
    given = product.inputs[0]
    given.name = "more"
    model.graph.outputs.append(given)
    plain = rewritten(lower_semantic_operators, model.clone())
    inputs = {"q": drawn((2, 3, 20, 8), 0), "k": drawn((2, 3, 40, 8), 1), "v": drawn((2, 3, 40, 8), 2)}
    inputs["cotangent:y"] = drawn((2, 3, 20, 8), 4)
    assert "FusedAttentionGrad" in kinds(fused(model))
    expected = run(translate(plain, torch.device("cpu")), plain, inputs)
    found = run(translate(model, torch.device("cpu")), model, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extents", [(0, 2, 5, 7), (3, 2, 0, 7), (3, 2, 5, 0)], ids=["no samples", "no queries", "no keys"])
def test_nothing_attends_to_nothing(extents, dtype):
    samples, heads, queries, keys = extents
    query, key, value = (torch.ones(samples, heads, count, 4, dtype=dtype) for count in (queries, keys, keys))
    result, logarithms = attention(query, key, value, None, 1.0)
    assert result.shape == query.shape
    assert result.dtype == dtype
    assert not result.any()
    gradients = attention_gradient(torch.ones_like(query), query, key, value, result, logarithms, None, 1.0)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e36])
@pytest.mark.parametrize("operand", range(4), ids=["query", "key", "value", "mask"])
@pytest.mark.parametrize("keys", [4, 40])
def test_what_is_not_finite_is_never_lost(bad, operand, keys):
    operands = [drawn((1, 2, keys, 8), 0), drawn((1, 2, keys, 8), 1), drawn((1, 2, keys, 8), 2), drawn((1, 1, keys, keys), 3)]
    operands[operand][0, 0, 1] = bad
    query, key, value, mask = operands
    wide = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    exact = torch.softmax(wide[0] @ wide[1].transpose(2, 3) * 0.5 + mask.double(), -1) @ wide[2]
    usual = torch.softmax(query @ key.transpose(2, 3) * 0.5 + mask, -1) @ value
    result, logarithms = attention(query, key, value, mask, 0.5)
    torch.testing.assert_close(result, usual, rtol=1e-4, atol=1e-5, equal_nan=True)
    if usual.isfinite().all() and abs(bad) != 1e36:
        gradients = torch.autograd.grad(exact, wide, torch.ones_like(exact))
        found = attention_gradient(torch.ones_like(query), query, key, value, result, logarithms, mask, 0.5)
        for one, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_of_exponentials_that_is_one_changes_nothing(dtype):
    query, key = torch.zeros(1, 2, 5, 8, dtype=dtype), torch.zeros(1, 2, 1, 8, dtype=dtype)
    value, flow = drawn((1, 2, 1, 8), 0).to(dtype), drawn((1, 2, 5, 8), 1).to(dtype)
    result, logarithms = attention(query, key, value, None, 1.0)
    assert torch.equal(result, value.expand_as(result))
    assert not logarithms.any()
    gradients = attention_gradient(flow, query, key, value, result, logarithms, None, 1.0)
    torch.testing.assert_close(gradients[2], flow.sum(2, keepdim=True))
    assert not gradients[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_lie_in_any_order(dtype):
    heads = [drawn((2, 8, 3, 6), seed).to(dtype).permute(0, 2, 3, 1) for seed in range(4)]
    packed = [tensor.contiguous() for tensor in heads]
    results = []
    for query, key, value, flow in (heads, packed):
        result, logarithms = attention(query, key, value, None, 0.5)
        results.append((result, *attention_gradient(flow, query, key, value, result, logarithms, None, 0.5)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("narrow", [True, False])
def test_attention_in_mixed_precision_is_a_kernel_where_there_is_one(narrow):
    program = burnish.compile(transformer(), loss="cross_entropy", optimizer="adamw", precision="bfloat16")
    model = kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"]
    attended = (ir.DataType.FLOAT, ir.DataType.BFLOAT16) if narrow else (ir.DataType.FLOAT,)
    found = [node for node in fuse(model, kernels=True, attended=attended).graph if node.op_type.startswith("FusedAttention")]
    assert {node.op_type for node in found} == ({"FusedAttention", "FusedAttentionGrad"} if narrow else set())
    assert all(value is None or value.dtype == ir.DataType.BFLOAT16 for node in found for value in node.inputs[:3])
    assert ("Softmax" in kinds(model)) != narrow


def attention_in_bfloat16(mask: str, dtype: str) -> ir.Model:
    masked = {
        "float": "wide = Cast <to = 1> (scores)\n given = Add (wide, m)",
        "bfloat16": "masked = Add (scores, m)\n given = Cast <to = 1> (masked)",
    }[dtype]
    heads = HEADS.replace("float[", "bfloat16[")
    return burnish.load(
        onnx.parser.parse_model(f"""{HEADER}graph ({heads}, {dtype}{mask} m) => (bfloat16[batch, 3, 20, 8] y) {{
            t = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (q, t)
            {masked}
            wide_p = Softmax <axis = -1> (given)
            p = Cast <to = 16> (wide_p)
            y = MatMul (p, v)
        }}""")
    )


@pytest.mark.parametrize("dtype", ["float", "bfloat16"])
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask])
def test_a_mask_is_added_on_either_side_of_the_cast(mask, dtype, monkeypatch):
    # As mixed precision has it: of a model in bfloat16 the gradient is computed in float32.
    monkeypatch.setattr("burnish.compiler.gradient.has_sixteen_bit_values", lambda model: False)
    model = semantic_gradients(attention_in_bfloat16(mask, dtype), wrt=["q", "k", "v"], of="y")
    fuse_attention(model.graph, (ir.DataType.BFLOAT16,))
    model.opset_imports.setdefault("burnish", 1)
    assert {"FusedAttention", "FusedAttentionGrad"} <= set(kinds(model))
    assert not {"MatMul", "Softmax", "SoftmaxGrad", "Add"} & set(kinds(model))
    inputs = {
        name: drawn((2, 3, count, 8), seed).bfloat16() for seed, (name, count) in enumerate({"q": 20, "k": 40, "v": 40}.items())
    }
    inputs |= {"m": drawn(MASKS[mask], 3).to(torch.float32 if dtype == "float" else torch.bfloat16)}
    inputs["cotangent:y"] = drawn((2, 3, 20, 8), 4).bfloat16()
    found = run(translate(model, torch.device("cpu")), model, inputs)
    wide = {name: tensor.double().requires_grad_(name in "qkv") for name, tensor in inputs.items()}
    y = torch.softmax(wide["q"] @ wide["k"].transpose(2, 3) + wide["m"], -1) @ wide["v"]
    gradients = torch.autograd.grad(y, [wide[name] for name in "qkv"], wide["cotangent:y"])
    exact = {"y": y.detach(), **{f"grad:{name}": gradient for name, gradient in zip("qkv", gradients, strict=True)}}
    for name, value in exact.items():
        assert float((found[name].double() - value).norm()) <= 2**-7 * float(value.norm()), name


GUARDED = {
    "float": """
        scores = MatMul (q, t)
        masked = Add (scores, m)
        p = Softmax <axis = -1> (masked)
        empty = IsNaN (p)
        shown = Where (empty, zero, p)
        y = MatMul (shown, v)""",
    "bfloat16": """
        scores = MatMul (q, t)
        wide = Cast <to = 1> (scores)
        masked = Add (wide, m)
        p = Softmax <axis = -1> (masked)
        empty = IsNaN (p)
        guarded = Where (empty, zero, p)
        shown = Cast <to = 16> (guarded)
        y = MatMul (shown, v)""",
}


@pytest.mark.parametrize("dtype", GUARDED)
def test_queries_that_a_guard_shows_no_key_are_zero_and_have_no_gradient(dtype):
    heads = HEADS.replace("float[", f"{dtype}[")
    source = onnx.parser.parse_model(f"""{HEADER}graph ({heads}, float[batch, 1, 20, 40] m) => ({dtype}[batch, 3, 20, 8] y) {{
        zero = Constant <value = float {{0.0}}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        {GUARDED[dtype]}
    }}""")
    kind = torch.float32 if dtype == "float" else torch.bfloat16
    inputs = {
        name: drawn((2, 3, rows, 8), seed).to(kind) for seed, (name, rows) in enumerate({"q": 20, "k": 40, "v": 40}.items())
    }
    inputs["m"] = drawn((2, 1, 20, 40), 3)
    inputs["m"][0, 0, 7] = -torch.inf
    inputs["cotangent:y"] = drawn((2, 3, 20, 8), 4).to(kind)
    model = semantic_gradients(burnish.load(source), wrt=["q", "k", "v"], of="y")
    fuse_attention(model.graph, (ir.DataType.FLOAT, ir.DataType.BFLOAT16))
    model.opset_imports.setdefault("burnish", 1)
    assert {"FusedAttention", "FusedAttentionGrad"} <= set(kinds(model))
    assert not {"MatMul", "Softmax", "SoftmaxGrad", "Where", "IsNaN"} & set(kinds(model))
    found = run(translate(model, torch.device("cpu")), model, inputs)
    assert not found["y"][0, :, 7].any()
    assert not found["grad:q"][0, :, 7].any()
    shown = {name: tensor.double() for name, tensor in inputs.items()}
    shown["m"][0, 0, 7] = 0.0
    shown["cotangent:y"][0, :, 7] = 0.0
    wide = {name: tensor.requires_grad_(name in "qkv") for name, tensor in shown.items()}
    y = torch.softmax(wide["q"] @ wide["k"].transpose(2, 3) + wide["m"], -1) @ wide["v"]
    gradients = torch.autograd.grad(y, [wide[name] for name in "qkv"], wide["cotangent:y"])
    for name, value in {f"grad:{name}": gradient for name, gradient in zip("qkv", gradients, strict=True)}.items():
        bound = 1e-6 if dtype == "float" else 2**-7
        assert float((found[name].double() - value).norm()) <= bound * float(value.norm()), name


def test_a_guard_without_a_gradient_is_part_of_the_kernel():
    source = onnx.parser.parse_model(f"""{HEADER}graph ({HEADS}, float[batch, 1, 20, 40] m) => (float[batch, 3, 20, 8] y) {{
        zero = Constant <value = float {{0.0}}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        {GUARDED["float"]}
    }}""")
    model = fused(burnish.load(source))
    assert "FusedAttention" in kinds(model)
    assert not {"Softmax", "IsNaN", "Where"} & set(kinds(model))


@pytest.mark.parametrize(
    "changed", ["one = Constant <value = float {1.0}> ()\n shown = Where (empty, one, p)", "shown = Where (empty, p, p)"]
)
def test_other_guards_stay(changed):
    body = GUARDED["float"].replace("shown = Where (empty, zero, p)", changed)
    source = onnx.parser.parse_model(f"""{HEADER}graph ({HEADS}, float[batch, 1, 20, 40] m) => (float[batch, 3, 20, 8] y) {{
        zero = Constant <value = float {{0.0}}> ()
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        {body}
    }}""")
    assert "FusedAttention" not in kinds(fused(burnish.load(source)))


@pytest.mark.slow
@needs_kernels
def test_the_step_of_a_transformer_has_both_kernels():
    program = burnish.compile(transformer(), loss="cross_entropy", optimizer="adamw")
    model = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True)
    assert {"FusedAttention", "FusedAttentionGrad"} <= set(kinds(model))
    assert "Softmax" not in kinds(model)
