"""What each parameter of a program is for, told by where it meets the data; neither names nor ranks decide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.graph import attribute_value, static_shape
from burnish.graph.uses import captured_by
from burnish.optim import ParameterInfo, ParameterKind

BIAS_OPERANDS: Mapping[str, int] = {"Conv": 2, "ConvTranspose": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "PRelu": 1, "RNN": 3}
"""The input that is a bias, or the slope of an activation."""

ADDED = frozenset({"Add", "Sub", "Sum"})
SCALED = frozenset({"Div", "Mul"})
PUT_IN = frozenset({"Concat", "Gather", "ScatterND", "Where"})

Origin = tuple[str, tuple[int, ...] | None]
"""A parameter, and which of its axes the axes of a value computed from it are; None where they are others."""


@dataclass(frozen=True)
class _Meeting:
    """Where a parameter meets data.

    Attributes:
        node: the operator.
        operand: which of its inputs; -1 for a value that its body reads.
        axes: which axes of the parameter that input has; None where it has others.
        depth: of the node.
    """

    node: ir.Node
    operand: int
    axes: tuple[int, ...] | None
    depth: int


def parameter_infos(graphs: Iterable[ir.Graph], parameters: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    """Find out what parameters are for.

    A parameter is followed through whatever is computed from parameters and constants alone, such as a transposition, a cast or
    the norm of weight normalization, up to the first operator that also reads data.

    Args:
        graphs: graphs in which the parameters are inputs ``param/<initializer>``; the first that reads a parameter decides.
        parameters: names, shapes and dtypes.

    Returns:
        What is known of each, by name.
    """
    meetings: dict[str, _Meeting] = {}
    for graph in graphs:
        meetings = _meetings(graph) | meetings
    return {info.name: _with_role(info, meetings.get(info.name)) for info in parameters}


def _with_role(info: ParameterInfo, meeting: _Meeting | None) -> ParameterInfo:
    if meeting is None:
        return info
    kind = _kind(meeting.node, meeting.operand, info.shape)
    axes = _input_axes(meeting) if kind is ParameterKind.WEIGHT else ()
    return replace(info, kind=kind, depth=meeting.depth, input_axes=axes)


def _meetings(graph: ir.Graph) -> dict[str, _Meeting]:
    """Return for each parameter the first operator in which it meets data."""
    origins: dict[ir.Value, tuple[Origin, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    depths: dict[ir.Value, int] = {}
    for value in graph.inputs:
        family, _, name = (value.name or "").partition("/")
        if family == "param":
            shapes[name] = static_shape(value) or ()
            origins[value] = ((name, tuple(range(len(shapes[name])))),)
        elif family != "stat":
            depths[value] = 0
    meetings: dict[str, _Meeting] = {}
    for node in graph:
        operands = list(_operands(node))
        data = [depths[value] for _, value in operands if value in depths]
        read = [(index, origin) for index, value in operands for origin in origins.get(value, ())]
        if data:
            depth = max(data) + any(_makes_layer(node, index, shapes[name]) for index, (name, _) in read)
            for index, (name, axes) in read:
                meetings.setdefault(name, _Meeting(node, index, axes, depth))
            depths |= dict.fromkeys(node.outputs, depth)
        else:
            passed = tuple((name, _axes_behind(node, axes)) for _, (name, axes) in read)
            origins |= dict.fromkeys(node.outputs, passed)
    return meetings


def _operands(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The values that a node reads by input, and those that the bodies of its attributes read from around it, as input -1."""
    yield from ((index, value) for index, value in enumerate(node.inputs) if value is not None)
    yield from ((-1, value) for value in captured_by(node))


def _axes_behind(node: ir.Node, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Which axes of the parameter the output of a node has whose input has these."""
    if axes is None or node.domain != "":
        return None
    if node.op_type == "Transpose":
        order = attribute_value(node, "perm", tuple(reversed(range(len(axes)))))
        return tuple(axes[axis] for axis in order)
    return axes if node.op_type in ("Cast", "Identity") else None


def _kind(node: ir.Node, operand: int, shape: tuple[int, ...]) -> ParameterKind:
    """What a parameter of this shape is that, or something computed from it, is this input of an operator that reads data."""
    operator = node.op_type
    is_per_channel = math.prod(shape) == max(shape, default=1)
    if operator.endswith("Normalization"):
        return ParameterKind.NORMALIZATION
    if BIAS_OPERANDS.get(operator) == operand or (operator in ADDED and is_per_channel):
        return ParameterKind.BIAS
    if operator in SCALED and is_per_channel:
        return ParameterKind.NORMALIZATION
    if operator in PUT_IN or operator in ADDED:
        return ParameterKind.EMBEDDING
    return ParameterKind.WEIGHT


def _makes_layer(node: ir.Node, operand: int, shape: tuple[int, ...]) -> bool:
    """Whether a parameter makes the operator that it meets data in a layer, by which depth is counted."""
    kind = _kind(node, operand, shape)
    return kind is ParameterKind.WEIGHT or (kind is ParameterKind.EMBEDDING and node.op_type == "Gather")


def _input_axes(meeting: _Meeting) -> tuple[int, ...]:
    """The axes of a weight that an output sums over; none where the operator is not one of those that say so."""
    axes, node = meeting.axes, meeting.node
    if axes is None or len(axes) < 2:
        return ()
    last, before = axes[-1], axes[-2]
    match node.op_type, meeting.operand:
        case "Conv", 1:
            summed = axes[1:]
        case "ConvTranspose", 1:
            summed = (axes[0], *axes[2:])
        case "Gemm", 0:
            summed = (before if attribute_value(node, "transA", 0) else last,)
        case "Gemm", 1:
            summed = (last if attribute_value(node, "transB", 0) else before,)
        case "MatMul", 0:
            summed = (last,)
        case "MatMul", 1:
            summed = (before,)
        case (("GRU" | "LSTM" | "RNN"), (1 | 2)):
            summed = (last,)
        case _:
            summed = ()
    return tuple(sorted(summed))
