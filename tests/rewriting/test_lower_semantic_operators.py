"""The walk that puts standard operators in the place of semantic ones, and what a target lets through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, TRAINING_DOMAIN, Builder, Tensor
from burnish.operators import lowering, registry
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators, write_out_newer
from burnish.targets import TARGETS, check_allowed, settle_opset
from oracles.rewritten import rewritten
from oracles.small_graphs import SmallGraph

TARGET = TARGETS["onnxruntime"]


def graph_of(domain: str, operator: str = "Halves", outputs: int = 2, opset: int = 18) -> SmallGraph:
    """A graph of one node over ``x`` [4], named 'halves', each of whose outputs is an output of the graph."""
    small = SmallGraph({"x": ("float32", [4])}, opset)
    results = small.builder.op(operator, small["x"], domain=domain, outputs=outputs, like=small["x"])
    results = results if isinstance(results, tuple) else (results,)
    node = results[0].value.producer()
    assert node is not None
    node.name, small.graph.opset_imports[domain] = "halves", opset if domain == "" else 1
    for index, tensor in enumerate(results):
        tensor.value.name = f"part{index}"
        small.output(f"y{index}", tensor)
    return small


def lowered(small: SmallGraph, **options) -> ir.Model:
    return rewritten(lower_semantic_operators, ir.Model(small.graph, ir_version=10), **options)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch):
    """Registers a lowering of ``Halves`` for the test."""

    def register(rule):
        monkeypatch.setitem(registry.records(), (BURNISH_DOMAIN, "Halves"), [])
        lowering("Halves")(rule)

    return register


def test_a_lowering_may_emit_semantic_operators_again(halves, monkeypatch):
    monkeypatch.setitem(registry.records(), (BURNISH_DOMAIN, "Doubled"), [])
    lowering("Doubled")(lambda op: op.required(0) * 2)
    halves(lambda op: (op.required(0), op.builder.op("Doubled", op.required(0), domain=BURNISH_DOMAIN, like=op.required(0))))
    small = graph_of(BURNISH_DOMAIN)
    check_allowed(lowered(small), TARGET)
    assert BURNISH_DOMAIN not in small.graph.opset_imports
    x = np.arange(4, dtype=np.float32)
    results = small.run(x=x)
    np.testing.assert_array_equal(results["y0"], x)
    np.testing.assert_array_equal(results["y1"], 2 * x)


@pytest.mark.parametrize(
    ("rule", "count"),
    [(lambda op: op.required(0), 1), (lambda op: (op.required(0),), 1), (lambda op: (op.required(0), None), 2)],
)
def test_a_lowering_that_returns_too_few_outputs(halves, rule, count):
    halves(rule)
    message = (
        rf"^what replaces burnish\.Halves 'halves' \(output 'part0'\) has {count} of 2 outputs, and none for its output 1, "
        r"'part1', which is read: let its lowering or training form return one for each$"
    )
    with pytest.raises(UnsupportedOperatorError, match=message):
        lowered(graph_of(BURNISH_DOMAIN))


def test_an_output_that_nothing_reads_needs_none(halves):
    halves(lambda op: op.required(0) * 2)
    small = SmallGraph({"x": ("float32", [4])})
    results = small.builder.op("Halves", small["x"], domain=BURNISH_DOMAIN, outputs=2, like=small["x"])
    small.output("y", results[0])
    lowered(small)
    np.testing.assert_array_equal(small.run(x=np.ones(4, np.float32))["y"], np.full(4, 2, np.float32))


def test_a_semantic_operator_without_a_lowering_is_named():
    with pytest.raises(
        UnsupportedOperatorError, match=r"^burnish\.Halves 'halves' \(output 'part0'\) has no lowering to standard ONNX operators"
    ):
        lowered(graph_of(BURNISH_DOMAIN))


def test_only_semantic_operators_are_kept_for_a_kernel(monkeypatch):
    """An operator of the standard's training domain is another, though it has the same name."""
    monkeypatch.setitem(registry.records(), (TRAINING_DOMAIN, "Halves"), [])

    def rule(op) -> tuple[Tensor, Tensor]:
        return op.required(0), op.required(0)

    lowering("Halves", domain=TRAINING_DOMAIN)(rule)
    assert next(node.domain for node in lowered(graph_of(BURNISH_DOMAIN), keep={"Halves"}).graph) == BURNISH_DOMAIN
    assert all(node.domain == "" for node in lowered(graph_of(TRAINING_DOMAIN), keep={"Halves"}).graph)


@pytest.mark.parametrize("domain", ["com.example", TRAINING_DOMAIN, "ai.onnx.ml"])
def test_an_operator_of_another_domain_is_no_kernel(domain):
    """A kernel is for the semantic operator of this name, not for whatever has it."""
    target = replace(TARGET, kernels=frozenset({"Halves", "Scaler"}))
    check_allowed(ir.Model(graph_of(BURNISH_DOMAIN).graph, ir_version=10), target)
    for operator in ("Halves", "Relu", *(("Scaler",) if domain != "ai.onnx.ml" else ())):
        message = rf"{domain}\.{operator} 'halves' \(output 'part0'\) is not among the operators that onnxruntime runs: lower it"
        with pytest.raises(UnsupportedOperatorError, match=message):
            check_allowed(ir.Model(graph_of(domain, operator).graph, ir_version=10), target)


def test_operators_of_the_standards_second_domain_run_where_the_target_says_so():
    check_allowed(ir.Model(graph_of("ai.onnx.ml", "LabelEncoder").graph, ir_version=10), TARGET)
    with pytest.raises(UnsupportedOperatorError, match=r"ai\.onnx\.ml\.LabelEncoder .* is not among the operators that"):
        check_allowed(ir.Model(graph_of("ai.onnx.ml", "LabelEncoder").graph, ir_version=10), replace(TARGET, domains={}))


def test_a_semantic_operator_without_a_kernel_is_not_allowed():
    with pytest.raises(UnsupportedOperatorError, match=r"burnish\.Halves .* is not among the operators that onnxruntime runs"):
        check_allowed(ir.Model(graph_of(BURNISH_DOMAIN).graph, ir_version=10), TARGET)


def test_an_operator_in_a_body_is_looked_at_too():
    inner = graph_of("com.example", outputs=1).graph
    small = SmallGraph({"x": ("float32", [4]), "which": ("bool", [])})
    branches = {"then_branch": _without_inputs(inner, small["x"]), "else_branch": _copy(small["x"])}
    node = ir.node("If", [small["which"].value], branches)
    small.graph.append(node)
    small.graph.outputs.extend(node.outputs)
    with pytest.raises(UnsupportedOperatorError, match=r"com\.example\.Halves"):
        check_allowed(ir.Model(small.graph, ir_version=10), TARGET)


def _without_inputs(graph: ir.Graph, x: Tensor) -> ir.Graph:
    graph.inputs[0].replace_all_uses_with(x.value)
    graph.inputs.clear()
    return graph


def _copy(x: Tensor) -> ir.Graph:
    graph = ir.Graph([], [], nodes=[], name="else", opset_imports={"": 18})
    graph.outputs.append(Builder(graph).op("Identity", x).value)
    return graph


def test_a_node_of_an_opset_that_the_target_does_not_load():
    model = ir.Model(graph_of("", "Swish", outputs=1, opset=24).graph, ir_version=10)
    with pytest.raises(
        UnsupportedOperatorError, match=r"Swish 'halves' .* is of opset 24, and onnxruntime loads opset 20 at most"
    ):
        settle_opset(model, replace(TARGET, newest_opset=20))
    settle_opset(model, TARGET)
    assert model.opset_imports[""] == 24


@pytest.mark.parametrize("newest", [20, 23])
def test_an_operator_that_is_too_new_is_written_out_where_the_standard_has_a_function(newest: int) -> None:
    model = ir.Model(graph_of("", "Swish", outputs=1, opset=24).graph, ir_version=10)
    target = replace(TARGET, newest_opset=newest)
    write_out_newer(model, target)
    assert "Swish" not in {node.op_type for node in model.graph}
    settle_opset(model, target)
    assert model.opset_imports[""] <= newest
