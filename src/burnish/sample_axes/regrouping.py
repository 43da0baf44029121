"""The axes of a Reshape: the factors of the operand's, cut anew.

Elements keep their order, so that the factors of all axes, one after the other, are those of the result. They are cut where the
numbers of the target say, from both ends; what is left in between is told where it is one axis, or where no samples are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from burnish.sample_axes.extents import Axes, Axis, Factor, Kind, Number, axis_of, has, is_fixed, lost, normal

Target = Number | None
"""The extent of an axis, or None for what remains."""


def regrouped(axes: Axes, target: Sequence[Target], key: str, reason: str) -> Axes:
    """Return the axes that a Reshape gives.

    Args:
        axes: of the operand.
        target: the extents of the result.
        key: begins the keys of symbols that are made up here.
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
        result[len(front) - 1] += tuple(left)  # of one place: a batch of one sample that the model fixes
    elif not targets and back:
        result[0] = (*left, *result[0])
    return tuple(map(normal, result))


def _taken(left: deque[int | Factor], targets: list[Target]) -> list[Axis]:
    """Take axes off the front of both, as long as the factors tell them."""
    axes: list[Axis] = []
    while targets and (extent := targets[0]) is not None:
        axis = _axis(left, extent)
        if axis is None:
            break
        axes.append(axis)
        del targets[0]
    return axes


def _axis(left: deque[int | Factor], extent: Number) -> Axis | None:
    """Take factors whose product is ``extent`` off the front; None, and nothing is taken, where there are none such."""
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
            whole = rest.over(Number(factor.extent))  # the model fixes the number of samples, and writes it as it is
        if whole is None:
            return None
        taken.append(factor)
        rest = whole
    left.clear()
    left.extend(pending)
    return tuple(taken)


def _between(left: Axis, targets: Sequence[Target], key: str, reason: str) -> list[Axis]:
    """The axes in the middle, which no number tells."""
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
