"""Patterns over a graph: small trees of operators that produce a value, with commuted operands in any order.

x = Variable("x")
centered = Node("Sub", x, Node("ReduceMean", x, reads=axes))
match = next(centered.match(value), None)

A pattern yields all its matches, so that callers can choose by shapes and dtypes. A variable, or a fact, has the same value
throughout a match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import onnx_ir as ir

from burnish.graph.annotations import describe_node
from burnish.graph.constants import constant_array
from burnish.graph.uses import is_read

COMMUTATIVE = frozenset({"Add", "Mul"})

ROUNDING = {
    ir.DataType.DOUBLE: 2.0**-52,
    ir.DataType.FLOAT: 2.0**-23,
    ir.DataType.FLOAT16: 2.0**-11,
    ir.DataType.BFLOAT16: 2.0**-8,
}
"""Relative tolerance of constants per dtype; computed constants are a bit less accurate than rounding."""


class _Misfit(NamedTuple):
    """The end of a failed attempt: matched nodes, the reason, and the expected operator, if any."""

    nodes: int
    reason: str
    expected: str = ""


_misfits: ContextVar[list[_Misfit] | None] = ContextVar("misfits", default=None)
"""Misfits collected for ``why_not``; None otherwise."""

_near_misses: ContextVar[list[str] | None] = ContextVar("near_misses", default=None)
"""Reasons collected by ``near_misses``; None otherwise."""

NEAR = 2
"""Smallest number of matched nodes for a near miss."""


@dataclass(frozen=True)
class Match:
    """One match of a pattern.

    Attributes:
        found: values of variables, named numbers and facts from ``reads``, by name.
        nodes: the matched nodes.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    nodes: frozenset[ir.Node] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def get(self, name: str) -> Any:
        """Return the value of a name, or None if this match has none."""
        return self.found.get(name)

    def bound(self, name: str, thing: Any) -> Match | None:
        """Return this match with another name, or None if the name already has a different value."""
        if name in self.found:
            return self if self.found[name] == thing else None
        return Match({**self.found, name: thing}, self.nodes)

    def is_closed(self, output: ir.Value) -> bool:
        """True if nothing outside the match reads its nodes' values, except ``output``. Unread nodes do not count as readers."""
        values = [value for node in self.nodes for value in node.outputs if value is not output]
        readers = (usage.node for value in values for usage in value.uses())
        return not any(map(ir.Value.is_graph_output, values)) and all(
            node in self.nodes or (not is_read(node)) for node in readers
        )


class Pattern(Protocol):
    """A pattern that may produce a value."""

    def match(self, value: ir.Value | None, match: Match = ...) -> Iterator[Match]:
        """Yield every extension of ``match`` with which this pattern produces ``value``."""
        ...


@dataclass(frozen=True)
class Variable:
    """Any value; the same value for every use of the variable."""

    name: str

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        if value is not None:
            bound = match.bound(self.name, _source(value))
            if bound is not None:
                yield bound


@dataclass(frozen=True)
class Number:
    """A constant with one element, equal to ``expected`` up to rounding in its dtype, or any, bound to ``name``."""

    expected: float | None = None
    name: str | None = None

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        array = None if value is None else constant_array(_source(value))
        if value is None or array is None or array.size != 1 or array.dtype.kind in "SUO":
            return
        number = float(array.reshape(-1)[0])
        if self.expected is not None:
            tolerance = ROUNDING.get(value.dtype, 0.0) if value.dtype is not None else 0.0
            if not abs(number - self.expected) <= tolerance * abs(self.expected):
                return
        bound = match if self.name is None else match.bound(self.name, number)
        if bound is not None:
            yield bound


class Node:
    """A node of the standard domain with one output that is read.

    Args:
        op_type: the operator.
        inputs: patterns of its inputs; in either order for Add and Mul.
        attributes: required attribute values.
        reads: returns facts to bind by name, or None if the node does not match. It may read inputs beyond ``inputs``; without it
            there must be none.
    """

    def __init__(
        self,
        op_type: str,
        *inputs: Pattern,
        attributes: Mapping[str, Any] | None = None,
        reads: Callable[[ir.Node], Mapping[str, Any] | None] | None = None,
    ):
        self.op_type = op_type
        self.inputs = inputs
        self.attributes = attributes or {}
        self.reads = reads

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        """Yield matches, skipping Identity nodes and casts to the present dtype."""
        passed: set[ir.Node] = set()
        while value is not None:
            node = value.producer()
            if node is not None and node.domain == "" and node.op_type == self.op_type:
                yield from self._match_node(node, Match(match.found, match.nodes | passed | {node}))
            if node is None or not _passes_on(node):
                self._note_other_maker(value, match)
                return
            passed.add(node)
            value = node.inputs[0]

    def _note_other_maker(self, value: ir.Value, match: Match) -> None:
        misfits, node = _misfits.get(), value.producer()
        if misfits is None or (node is not None and node.domain == "" and node.op_type == self.op_type):
            return
        maker = "no node" if node is None else describe_node(node)
        misfits.append(_Misfit(len(match.nodes), f"'{value.name}' comes from {maker}", self.op_type))

    def _match_node(self, node: ir.Node, match: Match) -> Iterator[Match]:
        if len(node.inputs) != len(self.inputs) and (self.reads is None or len(node.inputs) < len(self.inputs)):
            return
        for name, expected in self.attributes.items():
            if name not in node.attributes or node.attributes[name].value != expected:
                return
        facts = {} if self.reads is None else self.reads(node)
        if facts is None:
            _note(match, f"{describe_node(node)} has other attributes or operands than asked for")
            return
        for name, fact in facts.items():
            bound = match.bound(name, fact)
            if bound is None:
                return
            match = bound
        orders = [node.inputs, tuple(reversed(node.inputs))] if node.op_type in COMMUTATIVE else [node.inputs]
        for inputs in orders:
            yield from _match_all(tuple(zip(self.inputs, inputs, strict=False)), match)


class Either:
    """Any of several patterns; put the more specific ones first."""

    def __init__(self, *patterns: Pattern):
        self.patterns = patterns

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        for pattern in self.patterns:
            yield from pattern.match(value, match)


class Product:
    """A product of factors in any order and grouping."""

    def __init__(self, *factors: Pattern):
        self.factors = factors
        self.splits: list[Node] = []
        rest = range(1, len(factors))
        # Keep the first factor on one side: Mul matches both orders anyway.
        for size in range(len(factors) - 1):
            for chosen in combinations(rest, size):
                left = Product(factors[0], *(factors[index] for index in chosen))
                right = Product(*(factors[index] for index in rest if index not in chosen))
                self.splits.append(Node("Mul", left, right))

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        if len(self.factors) == 1:
            yield from self.factors[0].match(value, match)
        for split in self.splits:
            yield from split.match(value, match)


def find_match(pattern: Pattern, output: ir.Value, accepts: Callable[[Match], bool]) -> Match | None:
    """Return the first accepted match of a pattern at ``output`` whose inner values are read by nothing else, or None."""
    for match in pattern.match(output):
        if match.is_closed(output) and accepts(match):
            return match
    reasons = _near_misses.get()
    if reasons is not None:
        nodes, reason = _why_not(pattern, output, accepts)
        if nodes >= NEAR:
            reasons.append(f"not at '{output.name}': {reason}")
    return None


@contextmanager
def near_misses() -> Iterator[list[str]]:
    """Collect, within this context, the reasons why ``find_match`` failed for patterns with at least two matched nodes."""
    reasons: list[str] = []
    token = _near_misses.set(reasons)
    try:
        yield reasons
    finally:
        _near_misses.reset(token)


def why_not(pattern: Pattern, output: ir.Value, accepts: Callable[[Match], bool]) -> str:
    """Return the reason why ``find_match`` failed: the problem and the node at which the longest attempt ended."""
    return _why_not(pattern, output, accepts)[1]


def _why_not(pattern: Pattern, output: ir.Value, accepts: Callable[[Match], bool]) -> tuple[int, str]:
    misfits: list[_Misfit] = []
    token = _misfits.set(misfits)
    try:
        for match in pattern.match(output):
            if not match.is_closed(output):
                _note(match, "something else reads what the pattern computes on its way", after=1)
            elif not accepts(match):
                _note(match, "its operands have other shapes, dtypes or constants than asked for", after=2)
            else:
                return 0, "it fits"
    finally:
        _misfits.reset(token)
    if not misfits:
        return 0, "it has another number of operands"
    # Among equally long attempts, use the last: general forms are tried after specific ones.
    furthest = max(reversed(misfits), key=lambda misfit: misfit.nodes)
    expected = {misfit.expected: None for misfit in misfits if misfit[:2] == furthest[:2]}
    listed = f", and {' or '.join(sorted(expected))} was expected" if furthest.expected else ""
    return furthest.nodes, furthest.reason + listed


def _note(match: Match, reason: str, after: int = 0) -> None:
    misfits = _misfits.get()
    if misfits is not None:
        misfits.append(_Misfit(len(match.nodes) + after, reason))


def _match_all(pairs: tuple[tuple[Pattern, ir.Value | None], ...], match: Match) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    (pattern, value), *rest = pairs
    for found in pattern.match(value, match):
        yield from _match_all(tuple(rest), found)


def _passes_on(node: ir.Node) -> bool:
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Identity":
        return True
    dtype = node.inputs[0].dtype
    return node.op_type == "Cast" and dtype is not None and node.attributes["to"].value == int(dtype)


def _source(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and _passes_on(node):
        source = node.inputs[0]
        assert source is not None
        value = source
    return value
