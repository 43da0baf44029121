"""Operators that move elements, repeat them or leave some out."""

from __future__ import annotations

from burnish.sample_axes.extents import Axes, Axis, Kind, Number, axis_of, has, is_fixed, normal
from burnish.sample_axes.layouts import Call, Untold, gives_axes
from burnish.sample_axes.regrouping import Target, regrouped
from burnish.sample_axes.rules.elements import broadcast_axes

LARGEST = 2**31 - 1
"""A bound of a slice from here on means "to the end"."""


@gives_axes("Reshape")
def reshape(call: Call) -> Axes:
    axes = call.axes()
    copies = not call.attribute("allowzero", 0)
    target: list[Target] = []
    for at, number in enumerate(call.numbers(1)):
        if number == Number(0) and copies and at < len(axes):
            number = Number.of(axes[at])
        target.append(None if number == Number(-1) else number)
    return regrouped(axes, target, call.key, call.reason)


@gives_axes("Flatten")
def flatten(call: Call) -> Axes:
    axes, at = call.axes(), int(call.attribute("axis", 1))
    at = at % len(axes) if axes and at != len(axes) else at
    return tuple(normal(factor for axis in part for factor in axis) for part in (axes[:at], axes[at:]))


@gives_axes("Squeeze")
def squeeze(call: Call) -> Axes:
    axes = call.axes()
    named = call.named_axes()
    if named is None:
        extents = [Number.of(axis).integer for axis in axes]
        if None in extents:
            raise Untold(f"{call.reason}: it does not say which axes it removes")
        named = [at for at, extent in enumerate(extents) if extent == 1]
    removed = {axis % len(axes) for axis in named}
    target = [Number.of(axis) for at, axis in enumerate(axes) if at not in removed]
    return regrouped(axes, target, call.key, call.reason)


@gives_axes("Unsqueeze")
def unsqueeze(call: Call) -> Axes:
    named = call.named_axes()
    if named is None:
        raise Untold(call.reason)
    rank = call.rank() + len(named)
    added, rest = {axis % rank for axis in named}, iter(call.axes())
    return tuple(() if at in added else next(rest) for at in range(rank))


@gives_axes("Transpose")
def transpose(call: Call) -> Axes:
    axes, order = call.axes(), call.attribute("perm")
    return tuple(axes[axis] for axis in (range(len(axes))[::-1] if order is None else order))


@gives_axes("Concat")
def concat(call: Call) -> Axes:
    """Along an axis of samples, those of one operand come after all of another: a worker's are not side by side."""
    at = call.axis()
    parts = [call.axes(index) for index in range(len(call))]
    if len(parts) == 1:
        return parts[0]
    joined = list(broadcast_axes(call, [(*axes[:at], (), *axes[at + 1 :]) for axes in parts]))
    along = [axes[at] for axes in parts]
    joined[at] = call.lost("along")
    if all(map(is_fixed, along)):
        extents = [Number.of(axis).integer for axis in along]
        known = [extent for extent in extents if extent is not None]
        joined[at] = call.places(sum(known)) if len(known) == len(extents) else call.fixed("along")
    return tuple(joined)


@gives_axes("Split")
def split(call: Call) -> list[Axes | None]:
    axes, at, count = call.axes(), call.axis(), len(call.node.outputs)
    if count == 1:
        return [axes]
    sizes = call.integers(1) if call.has(1) else None
    parts: list[Axes | None] = []
    for index in range(count):
        part = call.lost(f"part {index}")
        if is_fixed(axes[at]):
            part = call.fixed(f"part {index}") if sizes is None else call.places(sizes[index])
        parts.append((*axes[:at], part, *axes[at + 1 :]))
    return parts


@gives_axes("Slice")
def slice_(call: Call) -> Axes:
    axes = list(call.axes())
    starts, ends = call.numbers(1), call.numbers(2)
    along = call.integers(3) if call.has(3) else list(range(len(starts)))
    steps = call.integers(4) if call.has(4) else [1] * len(starts)
    if along is None or not len(starts) == len(ends) == len(along):
        raise Untold(call.reason)
    for index, (start, end, axis) in enumerate(zip(starts, ends, along, strict=True)):
        step = None if steps is None else steps[index]
        axes[axis] = _sliced(call, axes[axis], start, end, step, f"along {axis}")
    return tuple(axes)


def _sliced(call: Call, axis: Axis, start: Number, end: Number, step: int | None, name: str) -> Axis:
    from_first = start == Number(0) and step == 1
    last = end.integer if not end.factors else None
    if from_first and (end == Number.of(axis) or (last is not None and last >= LARGEST)):
        return axis
    if not is_fixed(axis) or not start.is_fixed or not end.is_fixed:
        return call.lost(name)
    extent = Number.of(axis).integer
    first = start.integer
    if extent is not None and first is not None and last is not None and step:
        end_of = None if step < 0 and last < -extent else last
        return call.places(len(range(*slice(first, end_of, step).indices(extent))))
    return axis_of(end, f"{call.key}:{name}", call.reason) if from_first and end.factors else call.fixed(name)


@gives_axes("Expand")
def expand(call: Call) -> Axes:
    numbers = call.numbers(1)
    target = tuple(axis_of(number, f"{call.key}:target {at}", call.reason) for at, number in enumerate(numbers))
    return broadcast_axes(call, [call.axes(), target])


@gives_axes("Tile")
def tile(call: Call) -> Axes:
    """Copies of a whole axis stand one after the other: their number is the slowest factor."""
    axes = []
    for at, (axis, number) in enumerate(zip(call.axes(), call.numbers(1), strict=True)):
        copies = axis_of(number, f"{call.key}:copies {at}", call.reason)
        axes.append(normal((*copies, *axis)))
    return tuple(axes)


@gives_axes("Pad")
def pad(call: Call) -> Axes:
    axes = list(call.axes())
    added = call.numbers(1)
    along = call.integers(3) if call.has(3) else list(range(len(axes)))
    if along is None or len(added) != 2 * len(along):
        raise Untold(call.reason)
    for at, (before, behind) in zip(along, zip(added[: len(along)], added[len(along) :], strict=True), strict=True):
        if before == behind == Number(0):
            continue
        sizes = (Number.of(axes[at]).integer, before.integer, behind.integer)
        known = [size for size in sizes if size is not None]
        if not is_fixed(axes[at]) or not (before.is_fixed and behind.is_fixed):
            axes[at] = call.lost(f"along {at}")
        else:
            axes[at] = call.places(sum(known)) if len(known) == len(sizes) else call.fixed(f"along {at}")
    return tuple(axes)


@gives_axes("ConstantOfShape")
def filled(call: Call) -> Axes:
    return tuple(axis_of(number, f"{call.key}:{at}", call.reason) for at, number in enumerate(call.numbers(0)))


@gives_axes("RandomNormal", "RandomUniform")
def drawn(call: Call) -> Axes:
    return tuple(call.places(int(extent)) for extent in call.attribute("shape"))


@gives_axes("Multinomial")
def multinomial(call: Call) -> Axes:
    return call.axes()[0], call.places(int(call.attribute("sample_size", 1)))


@gives_axes("Range")
def counted(call: Call) -> Axes:
    """The numbers from 0 up to that of the samples count a worker's own."""
    start, limit, step = (call.numbers(index) for index in range(3))
    if start == (Number(0),) and step == (Number(1),):
        return (axis_of(limit[0], f"{call.key}:0", call.reason),)
    if not all(number.is_fixed for (number,) in (start, limit, step)):
        return (call.lost(),)
    bounds = [number.integer for (number,) in (start, limit, step)]
    known = [bound for bound in bounds if bound is not None]
    return (call.places(len(range(*known))) if len(known) == 3 and known[2] else call.fixed("count"),)


@gives_axes("NonZero")
def non_zero(call: Call) -> Axes:
    count = call.fixed("count") if call.layout(0).is_constant else call.lost("count")
    return call.places(max(1, call.rank())), count


@gives_axes("Compress")
def compressed(call: Call) -> Axes:
    if "axis" not in call.node.attributes:
        return (call.lost(),)
    at, axes = call.axis(), call.axes()
    count = call.fixed("count") if is_fixed(axes[at]) and call.layout(1).is_constant else call.lost("count")
    return (*axes[:at], count, *axes[at + 1 :])


@gives_axes("Resize", "Upsample", "CenterCropPad", "DFT")
def resized(call: Call) -> Axes:
    """Axes whose extent is kept are as they were, where samples are among them; the others are of the image or the signal."""
    axes = call.axes()
    if any(has(axis, Kind.LOST) for axis in axes):
        raise Untold(call.reason)
    unchanged = _kept(call, len(axes))
    results: list[Axis] = []
    for at, (axis, extent) in enumerate(zip(axes, call.declared(), strict=True)):
        if is_fixed(axis):
            results.append(call.fixed(f"along {at}") if extent is None else call.places(extent))
        else:
            results.append(axis if at in unchanged else call.lost(f"along {at}"))
    return tuple(results)


def _kept(call: Call, rank: int) -> set[int]:
    """The axes that stay what they are."""
    operator = call.node.op_type
    if operator == "DFT":
        transformed = call.integers(2) if call.has(2) else [int(call.attribute("axis", -2))]
        return set(range(rank)) - {transformed[0] % rank} if transformed else set()
    along = [axis % rank for axis in call.attribute("axes", None) or range(rank)]
    unchanged = set(range(rank)) - set(along)
    sizes = {"CenterCropPad": 1, "Resize": 3}.get(operator)
    if sizes is not None and call.has(sizes):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            return unchanged
        axes = call.axes()
        return unchanged | {at for at, number in zip(along, call.numbers(sizes), strict=False) if number == Number.of(axes[at])}
    scales = call.array(2 if operator == "Resize" else 1)
    return unchanged if scales is None else unchanged | {at for at, scale in zip(along, scales, strict=False) if scale == 1.0}
