"""Operators that pick elements by their places, or put them there.

Places that are picked by numbers may be those of other samples, or of the same in another order: an axis of samples is lost then.
"""

from __future__ import annotations

from collections.abc import Sequence

from burnish.sample_axes.extents import Axes, Axis, Kind, Number, broadcast, has, is_fixed
from burnish.sample_axes.layouts import Call, Untold, gives_axes


def _picked(call: Call, axes: Sequence[Axis]) -> Axes:
    """The axes of numbers that pick among samples."""
    return tuple(axis if is_fixed(axis) else call.lost(f"picked {at}") for at, axis in enumerate(axes))


@gives_axes("Gather")
def gather(call: Call) -> Axes:
    data, indices, at = call.axes(0), call.axes(1), call.axis()
    return (*data[:at], *(indices if is_fixed(data[at]) else _picked(call, indices)), *data[at + 1 :])


@gives_axes("GatherElements")
def gather_elements(call: Call) -> Axes:
    data, indices, at = call.axes(0), call.axes(1), call.axis()
    if not is_fixed(data[at]):
        return _picked(call, indices)
    pairs = enumerate(zip(data, indices, strict=True))
    return tuple(
        index_axis if axis == at or is_fixed(index_axis) else broadcast(index_axis, data_axis, f"{call.key}:{axis}", call.reason)
        for axis, (data_axis, index_axis) in pairs
    )


@gives_axes("GatherND")
def gather_slices(call: Call) -> Axes:
    data, indices = call.axes(0), call.axes(1)
    batch = int(call.attribute("batch_dims", 0))
    depth = Number.of(indices[-1]).integer
    if depth is None:
        raise Untold(call.reason)
    addressed, places = data[batch : batch + depth], indices[batch:-1]
    if not all(map(is_fixed, addressed)):
        places = _picked(call, places)
    return (*indices[:batch], *places, *data[batch + depth :])


@gives_axes("Scatter", "ScatterElements")
def scatter_elements(call: Call) -> Axes:
    axes, at = call.axes(), call.axis()
    put = _where_told(call, axes, call.axes(1))
    return (*put[:at], *_picked(call, axes[at : at + 1]), *put[at + 1 :])


@gives_axes("ScatterND")
def scatter_slices(call: Call) -> Axes:
    axes, depth = call.axes(), Number.of(call.axes(1)[-1]).integer
    if depth is None:
        raise Untold(call.reason)
    rest = axes[depth:]
    return (*_picked(call, axes[:depth]), *_where_told(call, rest, call.axes(2)[-len(rest) :] if rest else ()))


def _where_told(call: Call, axes: Axes, put: Axes) -> Axes:
    """The axes of what is written into, but lost where those of what is put there are."""
    pairs = enumerate(zip(axes, put, strict=True))
    return tuple(call.lost(f"put {at}") if has(new, Kind.LOST) else axis for at, (axis, new) in pairs)


@gives_axes("OneHot")
def one_hot(call: Call) -> Axes:
    axes = list(call.axes())
    (depth,) = call.numbers(1)
    at = int(call.attribute("axis", -1)) % (len(axes) + 1)
    count = call.lost("depth")
    if depth.is_fixed:
        count = call.fixed("depth") if depth.integer is None else call.places(depth.integer)
    axes.insert(at, count)
    return tuple(axes)


@gives_axes("RoiAlign", "MaxRoiPool")
def regions(call: Call) -> Axes:
    """A row for each region, whatever samples these are of."""
    return (call.axes(1)[0], *call.rest(0, 1))
