"""Operators whose results have the places of an operand, all of them or all but those that are reduced."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from burnish.sample_axes.extents import Axes, Axis, broadcast, is_fixed
from burnish.sample_axes.layouts import Call, gives_axes

LIKE_FIRST = (
    "BatchNormalization Bernoulli Cast CastLike Clip CumProd CumSum DequantizeLinear DynamicQuantizeLinear EyeLike "
    "GroupNormalization Hardmax InstanceNormalization LRN LayerNormalization LogSoftmax LpNormalization "
    "MeanVarianceNormalization QuantizeLinear RMSNormalization RandomNormalLike RandomUniformLike RotaryEmbedding Softmax Trilu"
).split()
"""Whose first result has the places of the first operand; others, statistics for example, are not told."""

REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()


def broadcast_axes(call: Call, operands: Iterable[Axes]) -> Axes:
    """The axes that operands come to which are broadcast against each other."""

    def two(one: Axes, other: Axes) -> Axes:
        rank = max(len(one), len(other))
        padded: list[Axes] = [((),) * (rank - len(axes)) + axes for axes in (one, other)]
        pairs = enumerate(zip(*padded, strict=True))
        return tuple(broadcast(a, b, f"{call.key}:{axis - rank}", call.reason) for axis, (a, b) in pairs)

    return reduce(two, operands)


def elementwise_axes(call: Call) -> Axes:
    return broadcast_axes(call, [call.axes(index) for index in range(len(call)) if call.has(index)])


@gives_axes(*LIKE_FIRST)
def like_first(call: Call) -> Axes:
    return call.axes()


@gives_axes("Dropout")
def dropout(call: Call) -> list[Axes | None]:
    return [call.axes(), call.axes()]


@gives_axes(*(f"Reduce{name}" for name in REDUCTIONS))
def reduction(call: Call) -> Axes:
    rank = call.rank()
    named = call.named_axes()
    if not named:
        if call.attribute("noop_with_empty_axes", 0):
            return call.axes()
        named = range(rank)
    return _without(call, {axis % rank for axis in named})


@gives_axes("ArgMax", "ArgMin")
def position(call: Call) -> Axes:
    return _without(call, {call.axis()})


def _without(call: Call, reduced: set[int]) -> Axes:
    axes = call.axes()
    if call.attribute("keepdims", 1):
        return tuple(() if index in reduced else axis for index, axis in enumerate(axes))
    return tuple(axis for index, axis in enumerate(axes) if index not in reduced)


@gives_axes("Det")
def determinant(call: Call) -> Axes:
    return call.axes()[:-2]


@gives_axes("TopK")
def largest(call: Call) -> list[Axes | None]:
    """Along an axis of samples it puts them in another order."""
    at = call.axis(default=-1)
    axes, (count,) = call.axes(), call.numbers(1)
    chosen: Axis = call.lost()
    if is_fixed(axes[at]) and count.is_fixed:
        chosen = call.fixed("chosen") if count.integer is None else call.places(count.integer)
    return [(*axes[:at], chosen, *axes[at + 1 :])] * 2


@gives_axes("ReverseSequence")
def reversed_sequence(call: Call) -> Axes:
    axes, at = list(call.axes()), int(call.attribute("time_axis", 0))
    axes[at] = axes[at] if is_fixed(axes[at]) else call.lost()
    return tuple(axes)
