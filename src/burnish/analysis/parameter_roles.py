"""The role of each parameter and integer input, found from the operator where it meets data, not from names or ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import attribute_value, bodies, describe_node, static_shape
from burnish.graph.annotations import PruningMark
from burnish.graph.uses import captured_by
from burnish.optim import ParameterInfo, ParameterKind
from burnish.optim.parameters import Masked

REARRANGES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result contains every element of their first input."""


def index_range(value: ir.Value) -> tuple[int | None, int | None]:
    """Return the smallest and largest valid value of an index input; (None, None) if it is not only an index.

    By the standard, a Gather along an axis of n accepts -n to n - 1 (-1 is the last). Only nodes that every run of the main
    graph computes count; branches do not.

    Raises:
        ModelError: a Gather along an axis that does not exist.
    """
    extents: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        for node, position in current.uses():
            if node.domain != "" or node.graph is not value.graph:
                continue
            if node.op_type == "Gather" and position == 1:
                extents.update(_extent(node))
            elif node.op_type in REARRANGES and position == 0 and _is_integer(node.outputs[0]):
                pending.append(node.outputs[0])
    return (-min(extents), min(extents) - 1) if extents else (None, None)


def _extent(gather: ir.Node) -> tuple[int, ...]:
    data = gather.inputs[0]
    if data is None or data.shape is None or len(data.shape) == 0:
        return ()
    axis = gather.attributes["axis"].as_int() if "axis" in gather.attributes else 0
    if not -len(data.shape) <= axis < len(data.shape):
        raise ModelError(
            f"{describe_node(gather)} gathers along axis {axis} of '{data.name}', which has {len(data.shape)} axes. "
            "Export the model again"
        )
    extent = data.shape[axis]
    return (extent,) if isinstance(extent, int) and extent > 0 else ()


def _is_integer(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.INT32, ir.DataType.INT64)


BIAS_OPERANDS: Mapping[str, int] = {"Conv": 2, "ConvTranspose": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "PRelu": 1, "RNN": 3}
"""The index of the input that is a bias or the slope of an activation."""

ADDED = frozenset({"Add", "Sub", "Sum"})
SCALED = frozenset({"Div", "Mul"})
PUT_IN = frozenset({"Concat", "Gather", "ScatterND", "Where"})

ELEMENTWISE = frozenset(
    "Abs Cast Clip DequantizeLinear Exp Floor Identity Neg QuantizeLinear Relu Round Sigmoid Softplus Sqrt Tanh".split()
)
"""Operators whose result has the axes of their first operand."""
BROADCAST = frozenset("Add Div Max Min Mul Sub Sum Where".split())
"""Operators whose result has the axes of an operand with the same shape."""
RESHAPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
PARTS = frozenset({"Concat", "Pad", "Slice", "Split"})
"""Operators that join, cut or extend their operands along an axis and keep the meaning of the axes."""

Axes = tuple[int | None, ...]
"""For each axis of a value, the matching axis of a parameter; None if there is none."""


@dataclass(frozen=True)
class _Origin:
    """A parameter that a value is computed from.

    Attributes:
        name: name of the parameter.
        axes: the parameter's axis for each axis of the value; None if unknown.
        reshaped: the shape and axes before a Reshape that mixed them; another Reshape may restore them.
        contracted: the axis that a product with another parameter sums over.
        masked: see ``ParameterInfo``.
    """

    name: str
    axes: Axes | None
    reshaped: tuple[tuple[int, ...], Axes] | None = None
    contracted: int | None = None
    masked: Masked = "no"


@dataclass(frozen=True)
class _Meeting:
    """The operator where a parameter meets data.

    Attributes:
        node: the operator.
        operand: index of its input; -1 for a value that its body returns.
        origin: the relation of that input to the parameter.
        depth: depth of the node, or of the node whose body contains it.
    """

    node: ir.Node
    operand: int
    origin: _Origin
    depth: int


def parameter_infos(graphs: Iterable[ir.Graph], parameters: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    """Return the roles of parameters.

    A parameter is followed through nodes that read only parameters and constants (a transposition, a mask, a quantization, the
    norm in weight normalization) to the first operator that also reads data, in bodies too.

    Args:
        graphs: graphs with the parameters as inputs ``param/<initializer>``; the first that reads a parameter decides.
        parameters: names, shapes and dtypes.

    Returns:
        The completed information, by name.
    """
    meetings: dict[str, _Meeting] = {}
    for graph in graphs:
        meetings = _Walk(graph).meetings | meetings
    return {info.name: _with_role(info, meetings.get(info.name)) for info in parameters}


def _with_role(info: ParameterInfo, meeting: _Meeting | None) -> ParameterInfo:
    if meeting is None:
        return info
    kind = _kind(meeting.node, meeting.operand, info.shape)
    axes = _input_axes(meeting) if kind is ParameterKind.WEIGHT else ()
    return replace(info, kind=kind, depth=meeting.depth, input_axes=axes, masked=meeting.origin.masked)


class _Walk:
    """A walk over a graph and its bodies, in order.

    Attributes:
        meetings: for each parameter, the first operator where it meets data.
    """

    def __init__(self, graph: ir.Graph):
        self._origins: dict[ir.Value, tuple[_Origin, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._depths: dict[ir.Value, int] = {}
        for value in graph.inputs:
            family, _, name = (value.name or "").partition("/")
            if family == "param":
                self._shapes[name] = static_shape(value) or ()
                self._origins[value] = (_Origin(name, tuple(range(len(self._shapes[name])))),)
            elif family != "stat":
                self._depths[value] = 0
        self.meetings = self._visit(graph)

    def _visit(self, graph: ir.Graph) -> dict[str, _Meeting]:
        meetings: dict[str, _Meeting] = {}
        for node in graph:
            operands = list(_operands(node))
            data = [self._depths[value] for _, value in operands if value in self._depths]
            read = [(index, origin) for index, value in operands for origin in self._origins.get(value, ())]
            if not data:
                self._origins |= dict.fromkeys(node.outputs, tuple(self._behind(node, *each) for each in read))
                continue
            depth = max(data) + any(_makes_layer(node, index, self._shapes[origin.name]) for index, origin in read)
            inside: dict[str, _Meeting] = {}
            for body in bodies(node):
                self._depths |= dict.fromkeys(body.inputs, depth)
                inside = self._visit(body) | inside
            # If a parameter reaches this node in several ways (a weight and its norm), prefer one that keeps the axes.
            for index, origin in sorted(read, key=lambda each: each[1].axes is None):
                met = inside.get(origin.name) if index == -1 else None
                meeting = _Meeting(node, index, origin, depth) if met is None else replace(met, depth=depth)
                meetings.setdefault(origin.name, meeting)
            self._depths |= dict.fromkeys(node.outputs, depth)
        return meetings

    def _behind(self, node: ir.Node, index: int, origin: _Origin) -> _Origin:
        lost = replace(origin, axes=None, reshaped=None)
        value = node.inputs[index] if index >= 0 else None
        shape, following = (None if each is None else static_shape(each) for each in (value, node.outputs[0]))
        if node.domain != "" or shape is None:
            return lost
        operator = node.op_type
        if operator in RESHAPING:
            return lost if index or following is None else _reshaped(origin, shape, following)
        if operator in ELEMENTWISE:
            return lost if index else origin
        if operator in BROADCAST:
            return replace(origin, masked=self._masked(node, index, origin, shape)) if shape == following else lost
        axes = origin.axes
        if axes is None:
            return lost
        if operator == "Transpose":
            order = attribute_value(node, "perm", tuple(reversed(range(len(axes)))))
            return replace(origin, axes=tuple(axes[axis] for axis in order))
        if operator in PARTS:
            return origin
        if operator in ("MatMul", "Gemm") and len(axes) == 2 and index < 2:
            turned = operator == "Gemm" and attribute_value(node, "transB" if index else "transA", 0)
            first, second = reversed(axes) if turned else axes
            kept, contracted = ((first, None), second) if index == 0 else ((None, second), first)
            return replace(origin, axes=kept, contracted=contracted)
        return lost

    def _masked(self, node: ir.Node, index: int, origin: _Origin, shape: tuple[int, ...]) -> Masked:
        """Return the kind of an elementwise product with a parameter that may contain zeros."""
        mark = PruningMark.of(node)
        if mark is not None:
            return "changing" if mark.changes else "fixed"
        others = (value for place, value in enumerate(node.inputs) if place != index and value is not None)
        constants = (value for value in others if value not in self._origins and len(shape) > 1)
        chooses = node.op_type in ("Mul", "Where") and any(static_shape(value) == shape for value in constants)
        return "changing" if chooses else origin.masked


def _operands(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """Yield the inputs of a node with their indices, then the values that its bodies capture, with index -1."""
    yield from ((index, value) for index, value in enumerate(node.inputs) if value is not None)
    yield from ((-1, value) for value in captured_by(node))


def _reshaped(origin: _Origin, shape: tuple[int, ...], following: tuple[int, ...]) -> _Origin:
    if origin.axes is None:
        if origin.reshaped is not None and origin.reshaped[0] == following:
            return replace(origin, axes=origin.reshaped[1], reshaped=None)
        return origin
    longer = [(extent, axis) for extent, axis in zip(shape, origin.axes, strict=True) if extent != 1]
    if [extent for extent, _ in longer] != [extent for extent in following if extent != 1]:
        return replace(origin, axes=None, reshaped=(shape, origin.axes))
    axes = (axis for _, axis in longer)
    return replace(origin, axes=tuple(None if extent == 1 else next(axes) for extent in following))


def _kind(node: ir.Node, operand: int, shape: tuple[int, ...]) -> ParameterKind:
    """Return the role of a parameter of this shape if it, or a value computed from it, is this input of an operator on data."""
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
    """True if a parameter makes its operator a layer, which counts towards the depth."""
    kind = _kind(node, operand, shape)
    return kind is ParameterKind.WEIGHT or (kind is ParameterKind.EMBEDDING and node.op_type == "Gather")


def _input_axes(meeting: _Meeting) -> tuple[int, ...]:
    """Return the axes of a weight that an output sums over; empty if the operator is not covered."""
    axes, node = meeting.origin.axes, meeting.node
    if axes is None or len(axes) < 2:
        return ()
    summed: Axes
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
        case "Einsum", operand:
            summed = _summed_by(attribute_value(node, "equation", ""), operand, axes)
        case _:
            return ()
    known = tuple(sorted(axis for axis in summed if axis is not None))
    # Two matrices may form the weight; one without input axes gets the axis that their product sums over.
    return known or (() if meeting.origin.contracted is None else (meeting.origin.contracted,))


def _summed_by(equation: str, operand: int, axes: Axes) -> Axes:
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")[operand] if operand >= 0 else ""
    if not result or len(letters) != len(axes) or not letters.isalpha():
        return ()
    return tuple(axis for letter, axis in zip(letters, axes, strict=True) if letter not in result)
