"""Operators without a rule are differentiated by the functions that the standard gives for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.testing import assert_allclose

import burnish
import burnish.operators.registry as registry
from burnish import engines
from burnish.autodiff import passes_gradient
from burnish.errors import GradientError
from burnish.graph.function_bodies import has_function
from burnish.operators import has_gradient
from oracles.combinations import spread
from oracles.gradient_harness import assert_close, check_standard, gradient_graph, run_gradients
from oracles.operator_cases import CASES, Case, cotangents_of

NEWEST = onnx.defs.onnx_opset_version()
STAGED = {"GroupNormalization": 1e-5}
"""Functions that compute in float32 whatever the dtype, and a variance as a difference of squares."""


def cases_of_functions() -> Iterator[tuple[str, Case]]:
    """The first smooth samples of every operator that has a rule and a function."""
    seen: Counter[str] = Counter()
    for label, case in CASES.items():
        operator = case.spec.op_type
        is_node = case.sample.build is None and case.sample.smooth
        if is_node and has_function(operator, case.sample.opset) and seen[operator] < 3:
            seen[operator] += 1
            yield label, case


FUNCTIONS = dict(cases_of_functions())


@spread("label", FUNCTIONS, test=12)
def test_the_function_of_an_operator_has_the_gradient_of_its_rule(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FUNCTIONS[label]
    operator = case.spec.op_type
    expected = run_gradients(gradient_graph(case.spec, case.sample, case.widest), case.sample, case.widest, cotangents_of(case))
    without_rule(operator, monkeypatch)
    graph = gradient_graph(case.spec, case.sample, case.widest)
    check_standard(graph)
    actual = run_gradients(graph, case.sample, case.widest, cotangents_of(case))
    for one, other in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
        assert_close(one, other, STAGED.get(operator, 1e-6), label)


def without_rule(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.records(), ("", operator), raising=False)
    assert not has_gradient(ir.node(operator, []), NEWEST)


NODES = {
    "CausalConvWithState": "(float[2,3,5] x, float[3,1,3] w) => (float[2,3,5] y) { y, last = CausalConvWithState (x, w) }",
    "LinearAttention": """(float[2,3,8] x) => (float[2,3,8] y)
        { y, last = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "linear"> (x, x, x) }""",
    "SwiGLU": "(float[2,3] x) => (float[2,3] y) { y = SwiGLU (x, x) }",
}
"""A node of each operator of the newest opset that has a function and no rule, in a model."""
WITHOUT_DERIVATIVE = {
    "Bernoulli": "it draws",
    "DynamicQuantizeLinear": "it rounds",
    "SequenceMap": "it maps sequences, whose elements are known or none",
}


def test_every_function_of_the_newest_opset_passes_gradients() -> None:
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    schemas = [onnx.defs.get_schema(name, NEWEST, "") for name in names if has_function(name, NEWEST)]
    takes_floats = {
        schema.name
        for schema in schemas
        if all(any("float" in text for formal in side for text in formal.types) for side in (schema.inputs, schema.outputs))
    }
    without = {name for name in takes_floats if not has_gradient(ir.node(name, []), NEWEST)}
    assert without <= {*NODES, *WITHOUT_DERIVATIVE}
    for name in without.intersection(NODES):
        (node,) = model_of(NODES[name], NEWEST).graph
        assert passes_gradient(node, NEWEST), name


def model_of(text: str, opset: int) -> ir.Model:
    return burnish.load(onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": {opset}]> g {text}'))


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_swiglu_is_differentiated_by_its_function(alpha: float) -> None:
    """An operator of the newest opset that nothing here knows of."""
    text = f"(float[N,3] a, float[N,3] b) => (float[N,3] y) {{ y = SwiGLU <alpha = {alpha}> (a, b) }}"
    gradient = burnish.grad(model_of(text, 28), ["a", "b"], target="reference")
    rng = np.random.default_rng(0)
    a, b, dy = (torch.from_numpy(rng.standard_normal((2, 3)).astype(np.float32)) for _ in range(3))
    leaves = [tensor.requires_grad_() for tensor in (a, b)]
    y = a * torch.sigmoid(alpha * a) * b
    y.backward(dy)
    feeds = {"a": a.detach().numpy(), "b": b.detach().numpy(), "cotangent:y": dy.numpy()}
    results = engines.get("reference").load(gradient)(feeds)
    assert_allclose(results["y"], y.detach().numpy(), rtol=1e-6)
    for leaf, name in zip(leaves, "ab", strict=True):
        assert_allclose(results[f"grad:{name}"], leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_causal_convolution_is_differentiated_by_its_function() -> None:
    text = """(float[N,3,5] x, float[3,1,3] w, float[3] b, float[N,3,2] past) => (float[N,3,5] y, float[N,3,2] present)
        { y, present = CausalConvWithState <activation = "silu"> (x, w, b, past) }"""
    gradient = burnish.grad(model_of(text, 27), ["x", "w", "b", "past"], of="y", target="reference")
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 5), "w": (3, 1, 3), "b": (3,), "past": (2, 3, 2)}
    leaves = {name: torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    x, w, b, past = (leaf.requires_grad_() for leaf in leaves.values())
    y = torch.nn.functional.silu(torch.nn.functional.conv1d(torch.cat([past, x], 2), w, b, groups=3))
    dy = torch.from_numpy(rng.standard_normal((2, 3, 5)).astype(np.float32))
    y.backward(dy)
    feeds = {name: leaf.detach().numpy() for name, leaf in leaves.items()} | {"cotangent:y": dy.numpy()}
    results = engines.get("reference").load(gradient)(feeds)
    assert_allclose(results["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, leaf in leaves.items():
        assert_allclose(results[f"grad:{name}"], leaf.grad.numpy(), rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_linear_attention_is_differentiated_by_its_function() -> None:
    """Its function is a Scan: the state decays, and takes in what is new of a value."""
    text = """(float[N,3,4] q, float[N,3,4] k, float[N,3,4] v, float[N,3,2] decay, float[N,3,2] beta)
        => (float[N,3,4] y, float[N,2,2,2] last)
        { y, last = LinearAttention <q_num_heads = 2, kv_num_heads = 2, update_rule = "gated_delta"> (q, k, v, , decay, beta) }"""
    names = ["q", "k", "v", "decay", "beta"]
    gradient = burnish.grad(model_of(text, 27), names, of="y", target="reference")
    rng = np.random.default_rng(0)
    leaves = [torch.from_numpy(rng.standard_normal((2, 3, size)).astype(np.float32)) for size in (4, 4, 4, 2, 2)]
    q, k, v, decay, beta = (leaf.requires_grad_() for leaf in leaves)
    state, rows = torch.zeros(2, 2, 2, 2), []
    for step in range(3):
        query, key, value = (tensor[:, step].reshape(2, 2, 2) for tensor in (q, k, v))
        state = torch.exp(decay[:, step])[..., None, None] * state
        new = beta[:, step, :, None] * (value - torch.einsum("bhk,bhkv->bhv", key, state))
        state = state + torch.einsum("bhk,bhv->bhkv", key, new)
        rows.append(torch.einsum("bhk,bhkv->bhv", query, state).reshape(2, 4) / 2**0.5)
    y = torch.stack(rows, 1)
    dy = torch.from_numpy(rng.standard_normal((2, 3, 4)).astype(np.float32))
    y.backward(dy)
    feeds = {name: leaf.detach().numpy() for name, leaf in zip(names, leaves, strict=True)} | {"cotangent:y": dy.numpy()}
    results = engines.get("reference").load(gradient)(feeds)
    assert_allclose(results["y"], y.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, leaf in zip(names, leaves, strict=True):
        assert_allclose(results[f"grad:{name}"], leaf.grad.numpy(), rtol=2e-5, atol=5e-6, err_msg=name)


def test_nodes_off_the_path_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rule("Gelu", monkeypatch)
    text = """(float[N,3] x, float[3] w) => (float[N,3] y)
        { before = Gelu (x) scaled = Mul (before, w) on_path = Gelu (scaled) y = Neg (on_path) }"""
    model = model_of(text, 20)
    gradient = burnish.grad(model, "w")
    assert [node.outputs[0].name for node in gradient.graph if node.op_type == "Gelu"] == ["before"]
    names = [node.name for node in gradient.graph if node.name]
    assert len(names) == len(set(names))
    erf = next(node for node in gradient.graph if node.op_type == "Erf")
    assert (erf.outputs[0].name or "").startswith(f"{erf.name.partition('/')[0]}/")
    assert any(output.name == "on_path" for node in gradient.graph for output in node.outputs)


def test_what_has_no_rule_in_its_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rule("Gelu", monkeypatch)
    without_rule("Erf", monkeypatch)
    model = model_of("(float[N,3] x) => (float[N,3] y) { y = Gelu (x) }", 20)
    with pytest.raises(GradientError, match=r"^Erf '\S*/Erf' \(output '\S*/ErfXSqrt'\) has no gradient rule"):
        burnish.grad(model, "x")
    (gelu,) = (node for node in model.graph if node.op_type == "Gelu")
    assert not passes_gradient(gelu, 20)
    monkeypatch.undo()
    assert passes_gradient(gelu, 20)
    without_rule("Gelu", monkeypatch)
    assert passes_gradient(gelu, 20)
