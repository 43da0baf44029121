"""What a trace takes for granted of the extents of inputs: where ``forward`` asks for them, the trace went one way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from burnish.importer.pytorch.layers import is_user_input

Axis = tuple[str, int]
"""An axis of an input: its name, and the number of the axis."""


@dataclass(frozen=True)
class Extents:
    """The open extents of a trace, and what it takes for granted of them.

    Attributes:
        sizes: of each axis that is open its extent, in symbols.
        conditions: what held for the examples, where ``forward`` or PyTorch asked: in the same symbols.
    """

    sizes: Mapping[Axis, Any] = field(default_factory=dict)
    conditions: Sequence[Any] = ()

    @classmethod
    def of(cls, program: torch.export.ExportedProgram) -> Extents:
        """Read what a program takes for granted."""
        names = {spec.arg.name for spec in program.graph_signature.input_specs if is_user_input(spec)}
        values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if node.name in names}
        extents: list[tuple[Axis, Any]] = [
            ((name, axis), size)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
            for axis, size in enumerate(value.shape)
        ]
        open_extents = [(place, size) for place, size in extents if isinstance(size, torch.SymInt)]
        nodes: dict[Axis, Any] = {place: size.node for place, size in open_extents if not size.node.expr.is_number}
        if not nodes:
            return cls()
        traced = next(iter(nodes.values())).shape_env
        sizes = {place: _settled(node.expr, traced.replacements) for place, node in nodes.items()}
        known = set().union(*(size.free_symbols for size in sizes.values()))
        conditions = (_settled(guard.expr, traced.replacements) for guard in traced.guards)
        return cls(sizes, tuple(dict.fromkeys(each for each in conditions if each.free_symbols and each.free_symbols <= known)))

    def unequal(self, shapes: Mapping[str, Sequence[int]]) -> list[Axis]:
        """The axes whose extents are equal to others in the trace, or follow from others, and are not so in these shapes."""
        symbols = self._symbols(shapes)
        return [place for place, size, extent in self._given(shapes) if _value(size, symbols) not in (None, extent)]

    def doubtful(self, shapes: Mapping[str, Sequence[int]]) -> list[Axis]:
        """The axes whose extents the trace may go another way for: of none or one, which it never looks at, or by a condition."""
        symbols = self._symbols(shapes)
        broken = [each for each in self.conditions if _value(each, symbols) is False]
        asked = set().union(*(each.free_symbols for each in broken))
        return [place for place, size, extent in self._given(shapes) if extent < 2 or size.free_symbols & asked]

    def _given(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[Axis, Any, int]]:
        for (name, axis), size in self.sizes.items():
            if name in shapes and axis < len(shapes[name]):
                yield (name, axis), size, shapes[name][axis]

    def _symbols(self, shapes: Mapping[str, Sequence[int]]) -> dict[Any, Any]:
        symbols: dict[Any, Any] = {}
        for _, size, extent in self._given(shapes):
            if size.is_symbol:
                symbols.setdefault(size, sympy.Integer(extent))
        return symbols


def _settled(expression: Any, replacements: Mapping[Any, Any]) -> Any:
    """An expression in the symbols that are left after those that turned out to be others were replaced."""
    while (following := expression.xreplace(replacements)) != expression:
        expression = following
    return expression


def _value(expression: Any, symbols: Mapping[Any, Any]) -> int | bool | None:
    """The value of an expression; None where that is open."""
    value = expression.xreplace(symbols)
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_number else None
