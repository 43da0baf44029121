"""Layouts (knowledge about the axes of values), and the view that an axis rule has of a node."""

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
    """The knowledge about a value.

    Attributes:
        axes: the content of each axis; None if not even the rank is known.
        is_constant: True if its elements are the same for every batch.
        numbers: its elements, if it is a scalar or a short list of integers or booleans.
        reason: why there are no axes.
    """

    axes: Axes | None
    is_constant: bool = False
    numbers: tuple[Number, ...] | None = None
    reason: str = ""


def small_numbers(value: ir.Value) -> tuple[Number, ...] | None:
    """Return the elements of a constant that is a scalar or a short list of integers or booleans; otherwise None."""
    shape = static_shape(value)
    is_small = shape is not None and len(shape) < 2 and sum(shape) <= LONGEST
    is_whole = value.dtype is not None and (value.dtype.is_integer() or value.dtype == ir.DataType.BOOL)
    array = constant_array(value) if is_small and is_whole else None
    return None if array is None else tuple(Number(int(element)) for element in array.reshape(-1))


def einsum_terms(equation: str) -> tuple[list[str], str]:
    """Return the letters of each Einsum operand and of its result; a missing result has the letters that occur once."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), result


class Untold(Exception):
    """The effect of an operator on the axes of its operands is unknown."""


class Following(Protocol):
    """The interface of the analysis for rules of nodes with bodies."""

    def layout(self, value: ir.Value) -> Layout: ...

    def assume(self, value: ir.Value, layout: Layout) -> None: ...

    def follow(self, graph: ir.Graph) -> None: ...

    def key(self, node: ir.Node) -> str:
        """Return a key that is unique to a node."""
        ...


class Call:
    """A node as seen by a rule.

    Args:
        node: the node.
        operands: the layouts of its inputs; None for an omitted one.
        analysis: the analysis that the node belongs to; None for a single node.
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
        """The prefix of the keys of symbols that this node creates."""
        return "" if self._analysis is None else self._analysis.key(self.node)

    @property
    def reason(self) -> str:
        return f"{describe_node(self.node)} mixes samples, or puts them where they cannot be told apart"

    def has(self, index: int) -> bool:
        return index < len(self.operands) and self.operands[index] is not None

    def layout(self, index: int) -> Layout:
        operand = self.operands[index]
        if operand is None:
            raise Untold(f"{describe_node(self.node)} lacks an operand")
        return operand

    def axes(self, index: int = 0) -> Axes:
        """Return the axes of an operand.

        Raises:
            Untold: they are unknown.
        """
        operand = self.layout(index)
        if operand.axes is None:
            raise Untold(operand.reason)
        return operand.axes

    def rank(self, index: int = 0) -> int:
        return len(self.axes(index))

    def numbers(self, index: int) -> tuple[Number, ...]:
        """Return the elements of a list of integers; new unknowns if only their number is known.

        Raises:
            Untold: their number is unknown.
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
        """Return the elements of a list of integers, if all are known."""
        if not self.has(index):
            return None
        numbers = self.layout(index).numbers
        known = [number.integer for number in numbers or ()]
        return None if numbers is None or None in known else [integer for integer in known if integer is not None]

    def named_axes(self) -> Sequence[int] | None:
        """Return the axes in the second operand, or in the attribute; None if neither is present.

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
        """Return a number known only at run time."""
        key = f"{self.key}:{name}"
        return Number(1, (Factor(key, Kind.FIXED) if constant else lost(key, self.reason),))

    def fixed(self, name: str) -> Axis:
        """Return an axis of unknown extent that is the same for every batch."""
        return (Factor(f"{self.key}:{name}", Kind.FIXED),)

    def lost(self, name: str = "") -> Axis:
        return (lost(f"{self.key}:{name}", self.reason),)

    def places(self, count: int) -> Axis:
        return () if count == 1 else (count,)

    def rest(self, output: int, start: int, rank: int | None = None) -> Axes:
        """Return the axes of an output from ``start`` on, with extents that are the same for every batch.

        Raises:
            Untold: shape inference found no rank and ``rank`` is None.
        """
        return tuple(
            self.fixed(f"{output} axis {axis}") if extent is None else self.places(extent)
            for axis, extent in enumerate(self._declared(output, rank)[start:], start)
        )

    def lost_rest(self, output: int, start: int, rank: int | None = None) -> Axes:
        """Return the axes of an output from ``start`` on, with samples lost in them; errors like ``rest``."""
        return tuple(self.lost(f"{output} axis {axis}") for axis in range(start, len(self._declared(output, rank))))

    def array(self, index: int) -> np.ndarray | None:
        return constant_array(self.node.inputs[index]) if self.has(index) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        return attribute_value(self.node, name, default)

    def axis(self, name: str = "axis", default: int = 0, rank: int | None = None) -> int:
        """Return an attribute with an axis, counted from the front."""
        rank = self.rank() if rank is None else rank
        return int(self.attribute(name, default)) % max(1, rank)

    def declared(self) -> list[int | None]:
        """Return the extents of the first output from shape inference.

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
"""A rule that returns the axes of the first result, or a list for all results with None for unknown axes.

An operator with bodies returns the layout of each result.
"""
MixesRule = Callable[[Call], Axes]
"""A rule that returns the axes whose places are combined into one element of a result."""
