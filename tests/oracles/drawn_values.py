"""The values of a random graph: with bounds on their magnitude, drawn anew or picked among those that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from burnish.graph import Builder, Tensor

MOST_ELEMENTS = 96
"""Of a value of known shape, and of what a sample of the tables reads or returns."""


@dataclass(frozen=True)
class Bounded:
    """A value of a graph, with a bound on the magnitude of its elements."""

    value: ir.Value
    bound: float

    @property
    def extents(self) -> tuple[int | str | None, ...]:
        """Numbers, names, or None for an extent that the values decide."""
        assert self.value.shape is not None
        return tuple(dim if isinstance(dim, int) else dim.value for dim in self.value.shape.dims)

    @property
    def is_known(self) -> bool:
        """Whether every extent is a number or the batch, and none of them is nothing."""
        return all(extent == "n" or (isinstance(extent, int) and extent > 0) for extent in self.extents)

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        return all(isinstance(extent, int) for extent in self.extents)

    @property
    def rank(self) -> int:
        return len(self.extents)


@dataclass
class Scope:
    """The graph or body that nodes are drawn into, and the values that they may read, those of the graphs around it included."""

    builder: Builder
    values: list[Bounded]
    depth: int = 0

    def tensor(self, bounded: Bounded) -> Tensor:
        return self.builder.tensor(bounded.value)


@dataclass
class Draw:
    """What the strategy asks for, and the main graph that inputs and weights are added to."""

    draw: st.DrawFn
    main: ir.Graph
    dtype: ir.DataType
    rng: np.random.Generator
    sizes: tuple[int, ...]
    allows_control: bool
    wrt: list[str] = field(default_factory=list)
    batches: list[dict[str, np.ndarray]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices) - 1)]

    def chance(self) -> bool:
        return self.draw(st.booleans())

    def extent(self) -> int:
        return self.number(1, 3)

    def variable(self, shape: Sequence[int | str], is_weight: bool, make: Callable[..., np.ndarray] | None = None) -> Bounded:
        """A new input of the main graph, or an initializer; the first axis of an input may be the batch."""
        name = f"{'w' if is_weight else 'x'}{len(self.weights) + len(self.main.inputs)}"
        value = ir.Value(name=name, type=ir.TensorType(self.dtype), shape=ir.Shape(shape))
        arrays = []
        for size in self.sizes[: 1 if is_weight else None]:
            drawn = self.rng.standard_normal([size if extent == "n" else extent for extent in shape]).clip(-3, 3)
            arrays.append(np.asarray(drawn if make is None else make(), self.dtype.numpy()))
        if is_weight:
            value.const_value = ir.tensor(arrays[0], name=name)
            self.main.register_initializer(value)
            self.weights[name] = arrays[0]
        else:
            self.add_input(value, arrays)
        if make is None:
            self.wrt.append(name)
        return Bounded(value, 3.0)

    def add_input(self, value: ir.Value, arrays: Sequence[np.ndarray]) -> None:
        self.main.inputs.append(value)
        for batch, array in zip(self.batches, arrays, strict=True):
            batch[str(value.name)] = array

    def given(self, array: np.ndarray) -> ir.Value:
        """A new input that no gradient is asked of: axes, a condition, a number of iterations."""
        array = np.asarray(array)
        name = f"given{len(self.main.inputs)}"
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
        self.add_input(value, [array] * len(self.batches))
        return value


Emit = Callable[[Draw, Scope], list[tuple[Tensor, float]]]


def pick(
    draw: Draw, scope: Scope, allowed: Callable[[Bounded], bool] = lambda value: True, otherwise: Sequence[int] = (2, 3)
) -> Bounded:
    """A value that may be read, rather one of the last; where none is allowed, a new weight of the shape ``otherwise``."""
    choices = [value for value in reversed(scope.values) if allowed(value)]
    return draw.one_of(choices) if choices else draw.variable(otherwise, is_weight=True)


def known(draw: Draw, scope: Scope, least_rank: int = 0) -> Bounded:
    chosen = pick(draw, scope, lambda value: value.is_known and value.rank >= least_rank)
    return chosen if chosen.rank >= least_rank else draw.variable([2, 3, 2][: max(least_rank, 1)], is_weight=True)


def beside(draw: Draw, scope: Scope, first: Bounded) -> Bounded:
    """A value that broadcasts with another: one that is there, or a weight of some of its axes."""

    def broadcasts(other: Bounded) -> bool:
        if not (first.is_known and other.is_known):
            return other.value is first.value or other.rank == 0
        pairs = list(zip(reversed(first.extents), reversed(other.extents), strict=False))
        sizes = [two if one == 1 else one for one, two in pairs]
        sizes += [extent for side in (first, other) for extent in side.extents[: side.rank - len(pairs)]]
        few = np.prod([extent if isinstance(extent, int) else max(draw.sizes) for extent in sizes]) <= MOST_ELEMENTS
        return bool(few) and all(one == two or 1 in (one, two) for one, two in pairs)

    if draw.chance():
        return pick(draw, scope, broadcasts, otherwise=())
    shape = [extent if isinstance(extent, int) and draw.chance() else 1 for extent in first.extents[draw.number(0, first.rank) :]]
    return draw.variable(shape, is_weight=draw.chance())


def elements(draw: Draw, extents: Sequence[int | str | None]) -> int:
    return int(np.prod([extent if isinstance(extent, int) else max(draw.sizes) for extent in extents]))
