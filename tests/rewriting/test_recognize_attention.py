"""Attention in pieces becomes one operator with a gradient, in the forms that exporters write; its lowering keeps every digit."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import burnish
from burnish.graph import model_proto
from burnish.operators.attention import ATTENTION, ATTENTION_GRAD
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.rewriting.recognize_attention import recognize_attention
from oracles.rewritten import rewritten
from oracles.semantic_gradients import semantic_gradients

HEADER = '<ir_version: 10, opset_import: ["": 18]>\n'
HEADS = "float[batch, 3, 5, 8] q, float[batch, 3, 8, 7] k, float[batch, 3, 7, 6] v"
RESULT = "float[batch, 3, 5, 6] y"
FORMS = {
    "plain": """
        scores = MatMul (q, k)
        p = Softmax (scores)
        y = MatMul (p, v)""",
    "factor": """
        c = Constant <value = float {0.3}> ()
        s = MatMul (q, k)
        scores = Mul (c, s)
        p = Softmax <axis = 3> (scores)
        y = MatMul (p, v)""",
    "divisor": """
        c = Constant <value = float {2.83}> ()
        s = MatMul (q, k)
        scores = Div (s, c)
        p = Softmax <axis = -1> (scores)
        y = MatMul (p, v)""",
    "mask": """
        s = MatMul (q, k)
        scores = Add (m, s)
        p = Softmax <axis = -1> (scores)
        y = MatMul (p, v)""",
    "guard": """
        zero = Constant <value = float {0.0}> ()
        s = MatMul (q, k)
        scores = Add (s, m)
        p = Softmax <axis = -1> (scores)
        empty = IsNaN (p)
        shown = Where (empty, zero, p)
        y = MatMul (shown, v)""",
}
MASK = "[batch, 1, 1, 7]"


def source_of(form: str, heads: str = HEADS, result: str = RESULT, mask: str = MASK) -> onnx.ModelProto:
    inputs = f"{heads}, float{mask} m" if form in ("mask", "guard") else heads
    return onnx.parser.parse_model(f"{HEADER}graph ({inputs}) => ({result}) {{{FORMS.get(form, form)}\n}}")


def drawn(model: ir.Model, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    shapes = {value.name or "": [2 if not isinstance(n, int) else n for n in value.shape or ()] for value in model.graph.inputs}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if ATTENTION.is_of(node)]


def values_of(model: ir.Model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [value.name for value in model.graph.outputs]
    return dict(zip(names, ReferenceEvaluator(model_proto(model)).run(None, inputs), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_operator_and_lowered_keeps_every_digit(form):
    source = source_of(form)
    model = rewritten(recognize_attention, burnish.load(source))
    (node,) = attentions(model)
    assert [other for other in model.graph if other.op_type != "Constant"] == [node]
    inputs = drawn(model)
    lowered = rewritten(lower_semantic_operators, model)
    np.testing.assert_array_equal(values_of(lowered, inputs)["y"], values_of(burnish.load(source), inputs)["y"])


@pytest.mark.parametrize("mask", ["[batch, 1, 1, 7]", "[5, 7]", "[3, 1, 1]", "[7]", "[1, 3, 5, 7]"])
def test_a_mask_of_any_axes_and_its_gradient_agree_with_pytorch(mask):
    source = source_of("mask", mask=mask)
    assert len(attentions(rewritten(recognize_attention, burnish.load(source)))) == 1
    model = burnish.grad(source, wrt=["q", "k", "v", "m"], of="y")
    inputs = drawn(model)
    found = values_of(model, inputs)
    wide = {name: torch.from_numpy(array).double().requires_grad_() for name, array in inputs.items()}
    y = torch.softmax(wide["q"] @ wide["k"] + wide["m"], -1) @ wide["v"]
    gradients = torch.autograd.grad(y, [wide[name] for name in "qkvm"], wide["cotangent:y"])
    for name, gradient in zip("qkvm", gradients, strict=True):
        np.testing.assert_allclose(found[f"grad:{name}"], gradient.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_a_query_that_no_key_is_shown_to_has_no_gradient():
    model = burnish.grad(source_of("guard"), wrt=["q", "k", "v"], of="y")
    inputs = drawn(model)
    inputs["m"][1] = -np.inf
    found = values_of(model, inputs)
    assert not found["y"][1].any()
    for name in "qkv":
        assert not found[f"grad:{name}"][1].any(), name
        assert np.isfinite(found[f"grad:{name}"]).all(), name
        assert found[f"grad:{name}"][0].any(), name


def test_the_gradient_is_one_operator_where_the_mask_has_none():
    kinds = [node.op_type for node in semantic_gradients(source_of("mask"), wrt=["q", "v"], of="y").graph]
    assert kinds == [ATTENTION.name, ATTENTION_GRAD.name]


def test_a_gradient_is_differentiated_again():
    first = burnish.grad(source_of("factor"), wrt=["q"], of="y")
    second = burnish.grad(first, wrt=["q", "k", "v"], of="grad:q")
    inputs = drawn(second)
    found = values_of(second, inputs)
    wide = {name: torch.from_numpy(array).double().requires_grad_() for name, array in inputs.items()}
    y = torch.softmax(wide["q"] @ wide["k"] * float(np.float32(0.3)), -1) @ wide["v"]
    (by_query,) = torch.autograd.grad(y, wide["q"], wide["cotangent:y"], create_graph=True)
    gradients = torch.autograd.grad(by_query, [wide[name] for name in "qkv"], wide["cotangent:grad:q"])
    for value, gradient in zip(second.graph.outputs[-3:], gradients, strict=True):
        np.testing.assert_allclose(found[value.name or ""], gradient.numpy(), rtol=1e-4, atol=1e-5, err_msg=value.name)


@pytest.mark.parametrize("also", ["", "grown = Mul (c, v)\n"])
def test_a_factor_that_is_differentiated_by_is_no_constant(also):
    """Where only a part of what reads it becomes attention, no part of its gradient may be lost."""
    body = f"""<float c = {{0.3}}> {{
        {also} s = MatMul (q, k)
        scores = Mul (c, s)
        p = Softmax <axis = 3> (scores)
        y = MatMul (p, {"grown" if also else "v"})
    }}"""
    source = onnx.parser.parse_model(f"{HEADER}graph ({HEADS}) => ({RESULT}) {body}")
    model = burnish.grad(source, wrt=["c"], of="y")
    inputs = drawn(model)
    wide = {name: torch.from_numpy(array).double() for name, array in inputs.items()}
    c = torch.tensor(float(np.float32(0.3)), dtype=torch.float64, requires_grad=True)
    y = torch.softmax(wide["q"] @ wide["k"] * c, -1) @ (wide["v"] * c if also else wide["v"])
    (gradient,) = torch.autograd.grad(y, c, wide["cotangent:y"])
    np.testing.assert_allclose(values_of(model, inputs)["grad:c"], gradient.numpy(), rtol=1e-4)


NOT_ATTENTION = {
    "another axis": """
        s = MatMul (q, k)
        p = Softmax <axis = 2> (s)
        y = MatMul (p, v)""",
    "changed probabilities": """
        s = MatMul (q, k)
        p = Softmax <axis = -1> (s)
        d = Relu (p)
        y = MatMul (d, v)""",
    "changed scores": """
        s = MatMul (q, k)
        t = Tanh (s)
        p = Softmax <axis = -1> (t)
        y = MatMul (p, v)""",
    "no number": """
        c = ReduceSum <keepdims = 0> (v)
        s = MatMul (q, k)
        f = Mul (s, c)
        p = Softmax <axis = -1> (f)
        y = MatMul (p, v)""",
    "zero": """
        c = Constant <value = float {0.0}> ()
        s = MatMul (q, k)
        f = Mul (s, c)
        p = Softmax <axis = -1> (f)
        y = MatMul (p, v)""",
}


@pytest.mark.parametrize("form", NOT_ATTENTION)
def test_what_is_not_attention_stays(form):
    assert attentions(rewritten(recognize_attention, burnish.load(source_of(NOT_ATTENTION[form])))) == []


def test_probabilities_that_the_model_returns_stay():
    source = source_of("plain", result=f"{RESULT}, float[batch, 3, 5, 7] p")
    assert attentions(rewritten(recognize_attention, burnish.load(source))) == []


def test_extents_that_may_differ_are_not_taken_for_the_same():
    heads = HEADS.replace("[batch, 3, 7, 6]", "[other, 3, 7, 6]")
    assert attentions(rewritten(recognize_attention, burnish.load(source_of("plain", heads)))) == []


def test_a_number_that_no_attribute_holds_stays_in_the_graph():
    heads, result = HEADS.replace("float", "double"), RESULT.replace("float", "double")
    exact, rounded = (FORMS["factor"].replace("float {0.3}", f"double {{{number}}}") for number in (0.25, 0.3))
    assert len(attentions(rewritten(recognize_attention, burnish.load(source_of(exact, heads, result))))) == 1
    assert attentions(rewritten(recognize_attention, burnish.load(source_of(rounded, heads, result)))) == []


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("changed probabilities", "'d' comes from Relu 'Relu' (output 'd'), and Cast or Softmax or Where was expected"),
        ("changed scores", "'t' comes from Tanh 'Tanh' (output 't'), and Add or Cast or Div or MatMul or Mul was expected"),
        ("another axis", "Softmax 'Softmax' (output 'p') has other attributes or operands than asked for"),
        ("zero", "its operands have other shapes, dtypes or constants than asked for"),
    ],
)
def test_the_log_says_why_attention_was_not_recognized(form, reason, caplog):
    with caplog.at_level(logging.DEBUG, "burnish"):
        recognize_attention(burnish.load(source_of(NOT_ATTENTION[form])))
    assert f"(output 'y') is not attention: {reason}" in caplog.text


def test_the_log_says_what_else_reads_the_probabilities(caplog):
    with caplog.at_level(logging.DEBUG, "burnish"):
        recognize_attention(burnish.load(source_of("plain", result=f"{RESULT}, float[batch, 3, 5, 7] p")))
    assert "is not attention: something else reads what the pattern computes on its way" in caplog.text
