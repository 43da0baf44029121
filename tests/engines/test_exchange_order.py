"""Exchanges between workers keep their order, however an engine has sorted its graph."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from burnish.engines.split_graph import keep_exchange_order
from burnish.errors import EngineError
from burnish.graph import BURNISH_DOMAIN


def node(name: str, inputs: list[ir.Value], order: int | None = None) -> ir.Node:
    attributes = [] if order is None else [ir.AttrInt64("order", order)]
    domain = "" if order is None else BURNISH_DOMAIN
    op_type = "Relu" if order is None else "AllReduce"
    return ir.Node(domain, op_type, inputs, attributes, outputs=[ir.Value(name=f"{name}_out")], name=name)


def graph_of(x: ir.Value, *nodes: ir.Node) -> ir.Graph:
    return ir.Graph([x], [nodes[-1].outputs[0]], nodes=list(nodes), name="graph", opset_imports={"": 20, BURNISH_DOMAIN: 1})


def names(graph: ir.Graph) -> list[str | None]:
    return [each.name for each in graph]


def test_a_graph_in_order_is_left_as_it_is():
    x = ir.Value(name="x")
    first = node("first", [x], 0)
    apart = node("apart", [x])
    second = node("second", [apart.outputs[0]], 1)
    graph = graph_of(x, first, apart, second)
    keep_exchange_order(graph)
    assert names(graph) == ["first", "apart", "second"]


def test_what_an_exchange_needs_comes_before_it():
    x = ir.Value(name="x")
    late = node("late", [x], 1)
    reader = node("reader", [late.outputs[0]])
    needed = node("needed", [x])
    early = node("early", [needed.outputs[0]], 0)
    last = node("last", [early.outputs[0], reader.outputs[0]])
    graph = graph_of(x, late, reader, needed, early, last)
    keep_exchange_order(graph)
    assert names(graph) == ["needed", "early", "late", "reader", "last"]
    assert [value.name for value in graph.outputs] == ["last_out"]


def test_what_is_read_within_a_branch_counts():
    x = ir.Value(name="x")
    condition = ir.Value(name="condition")
    late = node("late", [x], 1)
    made = node("made", [x])
    inner = node("inner", [made.outputs[0]])
    branch = ir.Graph([], [inner.outputs[0]], nodes=[inner], name="branch", opset_imports={"": 20})
    choice = ir.Node(
        "", "If", [condition], [ir.AttrGraph("then_branch", branch)], outputs=[ir.Value(name="chosen")], name="choice"
    )
    early = node("early", [choice.outputs[0]], 0)
    graph = graph_of(x, late, made, choice, early)
    keep_exchange_order(graph)
    assert names(graph) == ["made", "choice", "early", "late"]


def test_an_order_that_cannot_be_kept_is_named():
    x = ir.Value(name="x")
    late = node("late", [x], 1)
    early = node("early", [late.outputs[0]], 0)
    graph = graph_of(x, late, early)
    with pytest.raises(EngineError, match=r"Exchange 0 .* \('early'\) needs the result of exchange 1 \('late'\)"):
        keep_exchange_order(graph)
