"""Extents as products of integers, symbols and the number of samples.

An axis is a sequence of factors, from the slowest to the fastest: the first axis of ``Reshape(x, [-1, 2])`` of
``x [batch, time, 2]`` is ``batch, time``, and that of its transpose is ``time, batch``. A number is an unordered product of
factors.

A Reshape regroups the factors: elements keep their order, so the factors of all axes, one after the other, are those of the
result. The numbers of the target divide them, from both ends; the rest in the middle is known if it is one axis, or has no
samples.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class Kind(Enum):
    """The dependence of a symbolic extent on the batch."""

    FIXED = "the same for every batch"
    SAMPLES = "the number of samples"
    LOST = "samples in a way that is not known"


@dataclass(frozen=True)
class Factor:
    """A symbolic extent.

    Attributes:
        key: equal for equal extents.
        kind: its dependence.
        extent: for samples, their number if the model fixes it.
        is_uniform: for samples, True if all places are alike along the axis: constants repeated for each sample.
        reason: for a lost axis, the cause: a description of the node and its effect.
    """

    key: str
    kind: Kind
    extent: int | None = None
    is_uniform: bool = field(default=False, compare=False)
    reason: str = field(default="", compare=False)


Axis = tuple[int | Factor, ...]
Axes = tuple[Axis, ...]
ONE: Axis = ()


@dataclass(frozen=True)
class Number:
    """A product of an integer and symbolic extents.

    Attributes:
        coefficient: the integer; negative or zero only without factors.
        factors: the extents, in the same order for equal products.
    """

    coefficient: int
    factors: tuple[Factor, ...] = ()

    @staticmethod
    def of(factors: Iterable[int | Factor]) -> Number:
        integers, symbols = 1, []
        for factor in factors:
            if isinstance(factor, int):
                integers *= factor
            else:
                symbols.append(factor)
        return Number(integers, tuple(sorted(symbols, key=lambda factor: factor.key)))

    @property
    def integer(self) -> int | None:
        """The number if known, including a number of samples that the model fixes."""
        extents = [factor.extent for factor in self.factors]
        known = [extent for extent in extents if extent is not None]
        return self.coefficient * math.prod(known) if len(known) == len(extents) else None

    @property
    def is_fixed(self) -> bool:
        return all(factor.kind is Kind.FIXED for factor in self.factors)

    def __mul__(self, other: Number) -> Number:
        return Number.of((self.coefficient, other.coefficient, *self.factors, *other.factors))

    def over(self, other: Number) -> Number | None:
        """Return the quotient if it is a product; None if it may not be whole."""
        if other.coefficient == 0 or self.coefficient % other.coefficient:
            return None
        left, taken = Counter(self.factors), Counter(other.factors)
        if taken - left:
            return None
        return Number.of((self.coefficient // other.coefficient, *(left - taken).elements()))


def normal(factors: Iterable[int | Factor]) -> Axis:
    """Return the factors with adjacent integers multiplied, and without ones."""
    axis: list[int | Factor] = []
    for factor in factors:
        if isinstance(factor, int) and axis and isinstance(axis[-1], int):
            axis[-1] *= factor
        elif factor != 1:
            axis.append(factor)
    return tuple(axis)


def has(axis: Sequence[int | Factor], kind: Kind) -> bool:
    return any(isinstance(factor, Factor) and factor.kind is kind for factor in axis)


def is_fixed(axis: Sequence[int | Factor]) -> bool:
    return not has(axis, Kind.SAMPLES) and not has(axis, Kind.LOST)


def lost(key: str, reason: str) -> Factor:
    return Factor(key, Kind.LOST, reason=reason)


def axis_of(number: Number, key: str, reason: str) -> Axis:
    """Return an axis of ``number`` equal places; lost if samples are among several factors, whose order is unknown."""
    factors: Axis = normal((number.coefficient, *(replace(factor, is_uniform=True) for factor in number.factors)))
    if len(factors) < 2 or is_fixed(factors):
        return factors
    return (lost(key, reason),)


def broadcast(one: Axis, other: Axis, key: str, reason: str) -> Axis:
    """Return the axis of two broadcast axes, which are equal or have one with a single place.

    If samples are distinct in one of them, they are in the result: the other has as many places, or one.
    """
    if one == ONE or other == ONE:
        return one or other
    if one == other:
        return other if _is_uniform(one) else one
    for axis, beside in ((one, other), (other, one)):
        if has(axis, Kind.LOST):
            integer = Number.of(beside).integer
            # A symbol may turn out to be 1, and then the lost axis would be that of the result.
            stays = is_fixed(beside) and integer is not None
            stays |= has(beside, Kind.SAMPLES) and not _is_uniform(beside)
            return beside if stays and integer != 1 else axis
    samples = [has(axis, Kind.SAMPLES) for axis in (one, other)]
    if all(samples):
        return (other if _is_uniform(one) else one) if _alike(one, other) else (lost(key, reason),)
    if any(samples):
        return _broadcast_samples(*((one, other) if samples[0] else (other, one)))
    known = [axis for axis in (one, other) if Number.of(axis).integer is not None]
    return known[0] if known else (Factor(key, Kind.FIXED),)


def _is_uniform(axis: Axis) -> bool:
    return all(factor.is_uniform for factor in axis if isinstance(factor, Factor) and factor.kind is Kind.SAMPLES)


def _broadcast_samples(axis: Axis, fixed: Axis) -> Axis:
    """A model with a fixed batch of one sample may repeat it."""
    return normal((*axis, *fixed)) if Number.of(axis).integer == 1 else axis


def _alike(one: Axis, other: Axis) -> bool:
    """True if samples have the same places in two axes of the same extent: equal slower factors, or equal faster ones."""
    both = [sides(axis) for axis in (one, other)]
    if any(len(times) != 1 for times in both):
        return False
    (slower, faster), (others_slower, others_faster) = both[0][0], both[1][0]
    return Number.of(slower) == Number.of(others_slower) or Number.of(faster) == Number.of(others_faster)


def sides(axis: Sequence[int | Factor]) -> list[tuple[Axis, Axis]]:
    """Return the slower and the faster factors around the samples, for each occurrence of samples."""
    return [
        (tuple(axis[:index]), tuple(axis[index + 1 :]))
        for index, factor in enumerate(axis)
        if isinstance(factor, Factor) and factor.kind is Kind.SAMPLES
    ]


Target = Number | None
"""The extent of an axis, or None for the remainder."""


def regrouped(axes: Axes, target: Sequence[Target], key: str, reason: str) -> Axes:
    """Return the axes after a Reshape.

    Args:
        axes: axes of the operand.
        target: extents of the result.
        key: prefix for the keys of new symbols.
        reason: why samples would be lost.
    """
    left: deque[int | Factor] = deque(factor for axis in axes for factor in axis)
    targets = list(target)
    front = _taken(left, targets)
    left.reverse()
    targets.reverse()
    back = _taken(left, targets)
    left.reverse()
    targets.reverse()
    result = [*front, *_between(tuple(left), targets, key, reason), *(tuple(reversed(axis)) for axis in reversed(back))]
    if not targets and len(front) > 0:
        result[len(front) - 1] += tuple(left)  # one place: a batch of one sample, fixed by the model
    elif not targets and back:
        result[0] = (*left, *result[0])
    return tuple(map(normal, result))


def _taken(left: deque[int | Factor], targets: list[Target]) -> list[Axis]:
    """Take axes off the front of both, while the factors determine them."""
    axes: list[Axis] = []
    while targets and (extent := targets[0]) is not None:
        axis = _axis(left, extent)
        if axis is None:
            break
        axes.append(axis)
        del targets[0]
    return axes


def _axis(left: deque[int | Factor], extent: Number) -> Axis | None:
    """Take factors with product ``extent`` off the front, or nothing and return None."""
    rest = extent
    taken: list[int | Factor] = []
    pending = deque(left)
    while rest != Number(1):
        if not pending:
            return None
        factor = pending.popleft()
        if isinstance(factor, int):
            whole = rest.over(Number(factor))
            if whole is not None:
                taken.append(factor)
                rest = whole
            elif not rest.factors and rest.coefficient > 0 and factor % rest.coefficient == 0:
                taken.append(rest.coefficient)
                pending.appendleft(factor // rest.coefficient)
                rest = Number(1)
            else:
                return None
            continue
        whole = rest.over(Number.of((factor,)))
        if whole is None and factor.extent is not None:
            whole = rest.over(Number(factor.extent))  # the model fixes the number of samples and writes it as an integer
        if whole is None:
            return None
        taken.append(factor)
        rest = whole
    left.clear()
    left.extend(pending)
    return tuple(taken)


def _between(left: Axis, targets: Sequence[Target], key: str, reason: str) -> list[Axis]:
    if len(targets) == 1:
        return [left]
    if is_fixed(left) and all(target is None or target.is_fixed for target in targets):
        axes: list[Axis] = []
        for index, target in enumerate(targets):
            name = f"{key}:{index}"
            axes.append((Factor(name, Kind.FIXED),) if target is None else axis_of(target, name, reason))
        return axes
    whole = [axis for axis in left if isinstance(axis, Factor) and axis.kind is Kind.LOST]
    said = whole[0].reason if whole and not has(left, Kind.SAMPLES) else reason
    return [(lost(f"{key}:{index}", said),) for index in range(len(targets))]
