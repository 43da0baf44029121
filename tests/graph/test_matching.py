"""Patterns: what they find, in which order of operands, and what binds what."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from burnish.graph import Tensor
from burnish.graph.matching import Either, Match, Node, Number, Pattern, Product, Variable, find_match
from burnish.graph.uses import remove_unread
from oracles.small_graphs import SmallGraph


@pytest.fixture
def small() -> SmallGraph:
    return SmallGraph({name: ("float32", ["n", 4]) for name in "abcd"})


def matches(pattern: Pattern, tensor: Tensor) -> list[dict[str, object]]:
    return [dict(match.found) for match in pattern.match(tensor.value)]


A, B, C = Variable("a"), Variable("b"), Variable("c")


def test_operands_in_order_and_commuted(small: SmallGraph) -> None:
    a, b = small["a"].value, small["b"].value
    assert matches(Node("Sub", A, B), small["a"] - small["b"]) == [{"a": a, "b": b}]
    assert matches(Node("Add", A, B), small["a"] + small["b"]) == [{"a": a, "b": b}, {"a": b, "b": a}]
    assert matches(Node("Mul", A, Number(2.0)), small.builder.scalar(2.0, small["a"]) * small["a"]) == [{"a": a}]
    assert matches(Node("Add", A, B), small["a"] - small["b"]) == []


def test_a_variable_is_one_value(small: SmallGraph) -> None:
    square = Node("Mul", A, A)
    assert matches(square, small["a"] * small["a"])
    assert not matches(square, small["a"] * small["b"])


def test_what_changes_nothing_is_stepped_over(small: SmallGraph) -> None:
    b = small.builder
    same = b.op("Cast", b.op("Identity", small["a"]), to=1)
    product = b.op("Identity", same * small["a"])
    assert matches(Node("Exp", Node("Mul", A, A)), b.op("Exp", product)) == [{"a": small["a"].value}] * 2
    narrow = b.op("Cast", small["a"], to=10)
    assert matches(Node("Exp", A), b.op("Exp", narrow)) == [{"a": narrow.value}]


def test_attributes_and_read_facts(small: SmallGraph) -> None:
    node = small.builder.op("Softmax", small["a"], axis=1)
    assert matches(Node("Softmax", A, attributes={"axis": 1}), node)
    assert not matches(Node("Softmax", A, attributes={"axis": 0}), node)
    assert not matches(Node("Softmax", A, attributes={"missing": 0}), node)
    reading = Node("Softmax", A, reads=lambda found: {"axis": found.attributes["axis"].as_int()})
    assert matches(reading, node)[0]["axis"] == 1
    assert not matches(Node("Softmax", A, reads=lambda found: None), node)


def test_a_fact_that_is_read_twice_must_be_the_same(small: SmallGraph) -> None:
    soft = Node("Softmax", A, reads=lambda found: {"axis": found.attributes["axis"].as_int()})
    first, second = (small.builder.op("Softmax", small["a"], axis=axis) for axis in (0, 1))
    assert matches(Node("Sub", soft, soft), first - first)
    assert not matches(Node("Sub", soft, soft), first - second)


def test_inputs_that_a_pattern_does_not_name(small: SmallGraph) -> None:
    total = small.builder.op("ReduceSum", small["a"], small.builder.integers([1]))
    assert not matches(Node("ReduceSum", A), total)
    assert matches(Node("ReduceSum", A, reads=lambda found: {}), total)
    assert not matches(Node("ReduceSum", A, B, C, reads=lambda found: {}), total)


@pytest.mark.parametrize(
    ("array", "fits"),
    [
        (np.float32(0.1), True),
        (np.full((1, 1), 0.1, np.float32), True),
        (np.nextafter(np.float32(0.1), np.float32(1)), True),
        (np.float32(0.1001), False),
        (np.full(2, 0.1, np.float32), False),
        (np.float64(0.1), True),
        (np.float64(np.float32(0.1)), False),
        (np.float16(0.1), True),
        (np.float32(np.nan), False),
    ],
)
def test_numbers_up_to_rounding(small: SmallGraph, array: np.ndarray, fits: bool) -> None:
    constant = small.builder.constant(np.asarray(array)).value
    assert bool(list(Number(0.1).match(constant))) == fits


def test_a_named_number_is_bound(small: SmallGraph) -> None:
    assert matches(Number(name="n"), small.builder.constant(np.float32(3))) == [{"n": 3.0}]
    assert not matches(Number(name="n"), small["a"])
    assert not list(Number(name="n").match(ir.node("Constant", [], {"value_string": "text"}).outputs[0]))


def test_alternatives_in_order(small: SmallGraph) -> None:
    pattern = Either(Node("Add", A, A), Node("Add", A, B))
    assert matches(pattern, small["a"] + small["b"])[0] == {"a": small["a"].value, "b": small["b"].value}
    assert matches(pattern, small["a"] + small["a"])[0] == {"a": small["a"].value}


GROUPINGS = [((("a", "b"), "c"), "d"), (("a", "b"), ("c", "d")), ("a", ("b", ("c", "d"))), ("d", (("c", "a"), "b"))]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_product_in_any_grouping(small: SmallGraph, grouping: object) -> None:
    b = small.builder
    factors = {"a": b.op("Exp", small["a"]), "b": b.op("Log", small["b"]), "c": small["c"], "d": b.scalar(2.0, small["a"])}

    def product(part: object) -> Tensor:
        return product(part[0]) * product(part[1]) if isinstance(part, tuple) else factors[str(part)]

    found = matches(Product(Node("Exp", A), Node("Log", B), C, Number(2.0)), product(grouping))
    assert found == [{name: small[name].value for name in "abc"}] * len(found)
    assert found


def test_a_match_is_closed_when_nothing_else_reads_inside(small: SmallGraph) -> None:
    b = small.builder
    inner = b.op("Exp", small["a"])
    output = b.op("Log", inner)
    pattern = Node("Log", Node("Exp", A))

    def everything(match: Match) -> bool:
        return True

    assert find_match(pattern, output.value, everything) is not None
    assert find_match(pattern, output.value, lambda match: False) is None
    b.op("Neg", output)
    assert find_match(pattern, output.value, everything) is not None
    reader = b.op("Neg", inner)
    assert find_match(pattern, output.value, everything) is not None  # nothing reads the reader
    small.graph.outputs.append(reader.value)
    assert find_match(pattern, output.value, everything) is None
    small.graph.outputs[:] = [inner.value]
    assert find_match(pattern, output.value, everything) is None


def test_removal_of_what_nothing_reads(small: SmallGraph) -> None:
    b = small.builder
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones(4, np.float32)), type=ir.TensorType(ir.DataType.FLOAT))
    small.graph.register_initializer(weight)
    kept = b.op("Exp", small["a"])
    small.output("kept", kept)
    last = b.op("Mul", b.op("Add", kept, b.tensor(weight)), 2.0)
    node = last.value.producer()
    assert node is not None
    remove_unread(small.graph, node)
    assert small.operators(but=()) == ["Exp", "Identity"]
    assert not small.graph.initializers
