"""What is known of the axes of a value, and how a rule that tells those of a node's results sees the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, constant_array, describe_node, static_shape
from burnish.operators.extents import Axes, Axis, Factor, Kind, Number, lost

LONGEST = 64
"""Shapes are small; a longer list of integers is data."""


@dataclass(frozen=True)
class Layout:
    """What is known of a value.

    Attributes:
        axes: of what its places are; None where not even their number is known.
        is_constant: whether its elements are the same for every batch.
        numbers: its elements, where it is a scalar or a short list of integers or truth values.
        reason: why there are no axes.
    """

    axes: Axes | None
    is_constant: bool = False
    numbers: tuple[Number, ...] | None = None
    reason: str = ""


def small_numbers(value: ir.Value) -> tuple[Number, ...] | None:
    """Return the elements of a constant that is a scalar or a short list of integers or truth values; else None."""
    shape = static_shape(value)
    is_small = shape is not None and len(shape) < 2 and sum(shape) <= LONGEST
    is_whole = value.dtype is not None and (value.dtype.is_integer() or value.dtype == ir.DataType.BOOL)
    array = constant_array(value) if is_small and is_whole else None
    return None if array is None else tuple(Number(int(element)) for element in array.reshape(-1))


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """Return the letters of each operand of an Einsum and of its result, of each that occurs once where that is left out."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), result


class Untold(Exception):
    """What an operator does with the axes of its operands is not known."""


class Following(Protocol):
    """What follows nodes, for those that have bodies."""

    def layout(self, value: ir.Value) -> Layout:
        """What is known of a value."""
        ...

    def assume(self, value: ir.Value, layout: Layout) -> None:
        """Take what is known of an input of a body for given."""
        ...

    def follow(self, graph: ir.Graph) -> None:
        """Find out what is known of all values of a body."""
        ...

    def key(self, node: ir.Node) -> str:
        """The same for a node each time, and another for each."""
        ...


class Call:
    """A node, as a rule sees it.

    Args:
        node: the node.
        operands: the layouts of its inputs; None for one that is left out.
        analysis: that it is a part of; None for a node that is looked at alone.
    """

    def __init__(self, node: ir.Node, operands: Sequence[Layout | None], analysis: Following | None = None):
        self.node, self.operands, self._analysis = node, operands, analysis

    def __len__(self) -> int:
        return len(self.operands)

    @property
    def analysis(self) -> Following:
        assert self._analysis is not None, "only a graph that is followed has bodies"
        return self._analysis

    @property
    def key(self) -> str:
        """Begins the keys of the symbols that this node makes up."""
        return "" if self._analysis is None else self._analysis.key(self.node)

    @property
    def reason(self) -> str:
        """Why samples are lost here."""
        return f"{describe_node(self.node)} mixes samples, or puts them where they cannot be told apart"

    def has(self, index: int) -> bool:
        return index < len(self.operands) and self.operands[index] is not None

    def layout(self, index: int) -> Layout:
        operand = self.operands[index]
        if operand is None:
            raise Untold(f"{describe_node(self.node)} lacks an operand")
        return operand

    def axes(self, index: int = 0) -> Axes:
        """The axes of an operand.

        Raises:
            Untold: they are not known.
        """
        operand = self.layout(index)
        if operand.axes is None:
            raise Untold(operand.reason)
        return operand.axes

    def rank(self, index: int = 0) -> int:
        return len(self.axes(index))

    def numbers(self, index: int) -> tuple[Number, ...]:
        """The elements of a list of integers; made up where only their number is known.

        Raises:
            Untold: it is not.
        """
        operand = self.layout(index)
        if operand.numbers is not None:
            return operand.numbers
        length = Number.of(operand.axes[0]).integer if operand.axes is not None and len(operand.axes) == 1 else None
        if operand.axes == ():
            length = 1
        if length is None or length > LONGEST:
            raise Untold(f"{describe_node(self.node)} has an operand that is known only when it runs")
        return tuple(self.unknown(f"{index}:{place}", operand.is_constant) for place in range(length))

    def integers(self, index: int) -> list[int] | None:
        """The elements of a list of integers, where all are known."""
        if not self.has(index):
            return None
        numbers = self.layout(index).numbers
        known = [number.integer for number in numbers or ()]
        return None if numbers is None or None in known else [integer for integer in known if integer is not None]

    def named_axes(self) -> Sequence[int] | None:
        """The axes that the second operand names, or the attribute; None where neither is there.

        Raises:
            Untold: the operand is computed.
        """
        if not self.has(1):
            named: Sequence[int] | None = self.attribute("axes")
            return named
        axes = self.integers(1)
        if axes is None:
            raise Untold(self.reason)
        return axes

    def unknown(self, name: str, constant: bool) -> Number:
        """A number that only the running graph knows."""
        key = f"{self.key}:{name}"
        return Number(1, (Factor(key, Kind.FIXED) if constant else lost(key, self.reason),))

    def fixed(self, name: str) -> Axis:
        """An axis of an extent that is not known, and the same for every batch."""
        return (Factor(f"{self.key}:{name}", Kind.FIXED),)

    def lost(self, name: str = "") -> Axis:
        return (lost(f"{self.key}:{name}", self.reason),)

    def places(self, count: int) -> Axis:
        """An axis of ``count`` places."""
        return () if count == 1 else (count,)

    def rest(self, output: int, start: int, rank: int | None = None) -> Axes:
        """The axes of an output from one on, where their extents are the same for every batch.

        Raises:
            Untold: neither shape inference found how many there are, nor is ``rank`` given.
        """
        return tuple(
            self.fixed(f"{output} axis {axis}") if extent is None else self.places(extent)
            for axis, extent in enumerate(self._declared(output, rank)[start:], start)
        )

    def lost_rest(self, output: int, start: int, rank: int | None = None) -> Axes:
        """The axes of an output from one on, where samples are lost in them; errors as ``rest``."""
        return tuple(self.lost(f"{output} axis {axis}") for axis in range(start, len(self._declared(output, rank))))

    def array(self, index: int) -> np.ndarray | None:
        """An operand that is a constant."""
        return constant_array(self.node.inputs[index]) if self.has(index) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        return attribute_value(self.node, name, default)

    def axis(self, name: str = "axis", default: int = 0, rank: int | None = None) -> int:
        """An attribute that is an axis, counted from the front."""
        rank = self.rank() if rank is None else rank
        return int(self.attribute(name, default)) % max(1, rank)

    def declared(self) -> list[int | None]:
        """The extents of the first output that shape inference found.

        Raises:
            Untold: it found no rank.
        """
        return self._declared(0, None)

    def _declared(self, output: int, rank: int | None) -> list[int | None]:
        shape = self.node.outputs[output].shape
        if shape is None and rank is None:
            raise Untold(f"{describe_node(self.node)} gives a value of unknown rank")
        return [None] * (rank or 0) if shape is None else [extent if isinstance(extent, int) else None for extent in shape.dims]


AxesRule = Callable[[Call], Axes | list[Axes | None] | list[Layout]]
"""Tells the axes of the first result; or, in a list, of all, None of one where they are not known.

An operator with bodies tells all that is known of each result.
"""
MixesRule = Callable[[Call], Axes]
"""Tells the axes whose places go into one element of a result together."""
