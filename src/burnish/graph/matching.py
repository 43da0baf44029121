"""Patterns over a graph: small trees of operators that are found behind a value, whatever the order of commuted operands.

x = Variable("x")
centered = Node("Sub", x, Node("ReduceMean", x, reads=axes))
match = next(centered.match(value), None)

A pattern gives every way in which it fits, so that one may be chosen by conditions on shapes and dtypes. The same variable, or
the same fact, stands for one thing throughout a match.
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
"""How far, relatively, a constant of a dtype may be from the number it stands for; computed ones are off by a bit more."""


class _Misfit(NamedTuple):
    """Where an attempt ended, after how many nodes of it; why, and the operator that was expected, if one was."""

    nodes: int
    reason: str
    expected: str = ""


_misfits: ContextVar[list[_Misfit] | None] = ContextVar("misfits", default=None)
"""What ``why_not`` collects; None while nobody asks."""

_near_misses: ContextVar[list[str] | None] = ContextVar("near_misses", default=None)
"""What ``near_misses`` collects; None while nobody asks."""

NEAR = 2
"""Nodes that fit, from which on a pattern that is not there may have been meant."""


@dataclass(frozen=True)
class Match:
    """One way in which a pattern fits.

    Attributes:
        found: what variables, named numbers and read facts stand for: values, floats, and what ``reads`` returned.
        nodes: the nodes that the pattern's operators stand for.
    """

    found: Mapping[str, Any] = field(default_factory=dict)
    nodes: frozenset[ir.Node] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.found[name]

    def get(self, name: str) -> Any:
        """What a name stands for, or None where this way to fit does without it."""
        return self.found.get(name)

    def bound(self, name: str, thing: Any) -> Match | None:
        """This match with one more name, or None when the name stands for something else already."""
        if name in self.found:
            return self if self.found[name] == thing else None
        return Match({**self.found, name: thing}, self.nodes)

    def is_closed(self, output: ir.Value) -> bool:
        """Whether nothing but the match itself, and nodes that nothing reads, reads what its nodes compute, ``output`` aside."""
        values = [value for node in self.nodes for value in node.outputs if value is not output]
        readers = (usage.node for value in values for usage in value.uses())
        return not any(map(ir.Value.is_graph_output, values)) and all(
            node in self.nodes or (not is_read(node)) for node in readers
        )


class Pattern(Protocol):
    """Something that may stand behind a value."""

    def match(self, value: ir.Value | None, match: Match = ...) -> Iterator[Match]:
        """Give every way in which this fits ``value`` beside what ``match`` holds already."""
        ...


@dataclass(frozen=True)
class Variable:
    """Any value, the same one wherever the variable stands."""

    name: str

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        if value is not None:
            bound = match.bound(self.name, _source(value))
            if bound is not None:
                yield bound


@dataclass(frozen=True)
class Number:
    """A constant of one element: one that equals ``expected`` up to the rounding of its dtype, or any, bound to ``name``."""

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
        inputs: what stands behind its inputs; those of Add and Mul in either order.
        attributes: values that its attributes must have.
        reads: facts to bind, by name, or None where the node does not fit. It may look at inputs beyond ``inputs``;
            without it there must be none.
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
        """Casts to the dtype that a value has already, and Identity nodes, are stepped over."""
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
    """Any of several patterns, those that say more first."""

    def __init__(self, *patterns: Pattern):
        self.patterns = patterns

    def match(self, value: ir.Value | None, match: Match = Match()) -> Iterator[Match]:
        for pattern in self.patterns:
            yield from pattern.match(value, match)


class Product:
    """A product of factors, multiplied in any order and grouping."""

    def __init__(self, *factors: Pattern):
        self.factors = factors
        self.splits: list[Node] = []
        rest = range(1, len(factors))
        # The first factor stays on one side: Mul is matched in both orders anyway.
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
    """Return the first way in which a pattern stands behind ``output``, is read by nothing else, and is accepted."""
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
    """Collect why patterns that ``find_match`` looks for within are not there, of those of which two nodes or more are."""
    reasons: list[str] = []
    token = _near_misses.set(reasons)
    try:
        yield reasons
    finally:
        _near_misses.reset(token)


def why_not(pattern: Pattern, output: ir.Value, accepts: Callable[[Match], bool]) -> str:
    """Say why ``find_match`` gives nothing: what ended the attempt that came furthest, and at which node."""
    return _why_not(pattern, output, accepts)[1]


def _why_not(pattern: Pattern, output: ir.Value, accepts: Callable[[Match], bool]) -> tuple[int, str]:
    """After how many nodes the attempt ended that came furthest, and why."""
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
    # Of several that came as far the last: plain forms are tried after those that say more.
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
    """Whether the output of a node is its input."""
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Identity":
        return True
    dtype = node.inputs[0].dtype
    return node.op_type == "Cast" and dtype is not None and node.attributes["to"].value == int(dtype)


def _source(value: ir.Value) -> ir.Value:
    """The value that nodes which change nothing pass on."""
    while (node := value.producer()) is not None and _passes_on(node):
        source = node.inputs[0]
        assert source is not None
        value = source
    return value
