"""Operators with bodies: a branch that is taken, a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from burnish.operators.axes import Call, Layout
from burnish.operators.extents import Axis, Kind, broadcast, has, is_fixed

ROUNDS = 4
"""After this many rounds, the layouts of what a loop carries have settled, or are lost."""


def branches(call: Call) -> Sequence[Layout]:
    told = []
    for name in ("then_branch", "else_branch"):
        branch = call.node.attributes[name].as_graph()
        call.analysis.follow(branch)
        told.append([call.analysis.layout(value) for value in branch.outputs])
    constant = call.layout(0).is_constant
    return [_either(call, one, other, f"result {index}", constant) for index, (one, other) in enumerate(zip(*told, strict=True))]


def loop(call: Call) -> Sequence[Layout]:
    body = call.node.attributes["body"].as_graph()
    constant = all(layout.is_constant for layout in call.operands[:2] if layout is not None)
    carried = [_without_numbers(call.layout(index)) for index in range(2, len(call))]
    call.analysis.assume(body.inputs[0], Layout((), is_constant=True))
    call.analysis.assume(body.inputs[1], Layout((), is_constant=constant))
    carried, results = _settled(call, body, body.inputs[2:], carried, 1)
    constant = constant and call.analysis.layout(body.outputs[0]).is_constant
    count = call.fixed("count") if constant else call.lost("count")
    return [*carried, *(_stacked(result, count, 0) for result in results)]


def scan(call: Call) -> Sequence[Layout]:
    body = call.node.attributes["body"].as_graph()
    number = int(call.attribute("num_scan_inputs"))
    states = [_without_numbers(call.layout(index)) for index in range(len(call) - number)]
    scanned: Axis = ()
    along = call.attribute("scan_input_axes", [0] * number)
    for index, at in zip(range(len(states), len(call)), along, strict=True):
        axes = call.axes(index)
        at = at % len(axes)
        scanned = axes[at]
        call.analysis.assume(body.inputs[index], Layout((*axes[:at], *axes[at + 1 :]), call.layout(index).is_constant))
    directions = [*call.attribute("scan_input_directions", ()), *call.attribute("scan_output_directions", ())]
    if any(directions) and not is_fixed(scanned):
        scanned = call.lost("scanned")
    states, results = _settled(call, body, body.inputs[: len(states)], states, 0)
    places = call.attribute("scan_output_axes", [0] * len(results))
    return [*states, *(_stacked(result, scanned, at) for result, at in zip(results, places, strict=True))]


def _settled(
    call: Call, body: ir.Graph, inputs: Sequence[ir.Value], carried: list[Layout], first: int
) -> tuple[list[Layout], list[Layout]]:
    """What a body carries from one round to the next, and what else it gives.

    ``first`` is the output from which on it carries.
    """
    for last in (*[False] * ROUNDS, True):
        for value, layout in zip(inputs, carried, strict=True):
            call.analysis.assume(value, layout)
        call.analysis.follow(body)
        told = [call.analysis.layout(value) for value in body.outputs[first:]]
        pairs = enumerate(zip(carried, told, strict=False))
        following = [_either(call, one, other, f"carried {index}", True) for index, (one, other) in pairs]
        if following == carried:
            break
        carried = [Layout(None, reason=call.reason) for _ in carried] if last else following
    return carried, told[len(carried) :]


def _without_numbers(layout: Layout) -> Layout:
    return Layout(layout.axes, layout.is_constant, None, layout.reason)


def _stacked(layout: Layout, count: Axis, at: int) -> Layout:
    if layout.axes is None:
        return layout
    at = at % (len(layout.axes) + 1)
    return Layout((*layout.axes[:at], count, *layout.axes[at:]), layout.is_constant and is_fixed(count))


def _either(call: Call, one: Layout, other: Layout, name: str, constant: bool) -> Layout:
    """What is known of a value that is one of two."""
    constant = constant and one.is_constant and other.is_constant
    if one.axes is None or other.axes is None or len(one.axes) != len(other.axes):
        return Layout(None, constant, reason=one.reason or other.reason or call.reason)
    axes = tuple(
        _either_axis(call, a, b, f"{name} axis {at}") for at, (a, b) in enumerate(zip(one.axes, other.axes, strict=True))
    )
    return Layout(axes, constant)


def _either_axis(call: Call, one: Axis, other: Axis, name: str) -> Axis:
    if one == other:
        return one
    if is_fixed(one) and is_fixed(other):
        return call.fixed(name)
    if all(has(axis, Kind.SAMPLES) and not has(axis, Kind.LOST) for axis in (one, other)):
        return broadcast(one, other, f"{call.key}:{name}", call.reason)
    return call.lost(name)


BODIES: dict[str, Callable[[Call], Sequence[Layout]]] = {"If": branches, "Loop": loop, "Scan": scan}
"""What tells everything of the results of operators with bodies."""
