"""What each parameter and integer input of a program is for, told by where it meets the data; neither names nor ranks decide."""

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
"""Operators whose result holds every element of their first input."""


def index_range(value: ir.Value) -> tuple[int | None, int | None]:
    """Return the smallest and largest value that an input of indices may hold, None and None where it is read as something else.

    A Gather from an axis of n takes -n to n - 1, where -1 is the last, by the standard. Only what every run of the main graph
    computes counts, not what a branch may read.

    Raises:
        ModelError: a Gather along an axis that there is not.
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
"""The input that is a bias, or the slope of an activation."""

ADDED = frozenset({"Add", "Sub", "Sum"})
SCALED = frozenset({"Div", "Mul"})
PUT_IN = frozenset({"Concat", "Gather", "ScatterND", "Where"})

ELEMENTWISE = frozenset(
    "Abs Cast Clip DequantizeLinear Exp Floor Identity Neg QuantizeLinear Relu Round Sigmoid Softplus Sqrt Tanh".split()
)
"""Operators whose result has the axes of their first operand."""
BROADCAST = frozenset("Add Div Max Min Mul Sub Sum Where".split())
"""Operators whose result has the axes of an operand of its shape."""
RESHAPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
PARTS = frozenset({"Concat", "Pad", "Slice", "Split"})
"""Operators that join, cut or lengthen what they read along an axis, and keep what the axes are."""

Axes = tuple[int | None, ...]
"""Which axis of a parameter each axis of a value is; None for an axis that it has not."""


@dataclass(frozen=True)
class _Origin:
    """A parameter that a value is computed from.

    Attributes:
        name: of the parameter.
        axes: which of its axes those of the value are; None where they are others.
        reshaped: where a Reshape mixed them, the shape and the axes before it, which another Reshape may restore.
        contracted: the axis along which a product with another parameter sums.
        masked: as ``ParameterInfo`` has it.
    """

    name: str
    axes: Axes | None
    reshaped: tuple[tuple[int, ...], Axes] | None = None
    contracted: int | None = None
    masked: Masked = "no"


@dataclass(frozen=True)
class _Meeting:
    """Where a parameter meets data.

    Attributes:
        node: the operator.
        operand: which of its inputs; -1 for a value that its body returns.
        origin: what of the parameter that input is.
        depth: of the node, or of that whose body it stands in.
    """

    node: ir.Node
    operand: int
    origin: _Origin
    depth: int


def parameter_infos(graphs: Iterable[ir.Graph], parameters: Iterable[ParameterInfo]) -> dict[str, ParameterInfo]:
    """Find out what parameters are for.

    A parameter is followed through whatever is computed from parameters and constants alone, such as a transposition, a mask, a
    quantization or the norm of weight normalization, up to the first operator that also reads data, in bodies too.

    Args:
        graphs: graphs in which the parameters are inputs ``param/<initializer>``; the first that reads a parameter decides.
        parameters: names, shapes and dtypes.

    Returns:
        What is known of each, by name.
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
    """A walk over a graph and the bodies in it, in its order.

    Attributes:
        meetings: for each parameter the first operator in which it meets data.
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
            # Of several ways from a parameter to this node, such as the norm of a weight beside it, one that keeps the axes.
            for index, origin in sorted(read, key=lambda each: each[1].axes is None):
                met = inside.get(origin.name) if index == -1 else None
                meeting = _Meeting(node, index, origin, depth) if met is None else replace(met, depth=depth)
                meetings.setdefault(origin.name, meeting)
            self._depths |= dict.fromkeys(node.outputs, depth)
        return meetings

    def _behind(self, node: ir.Node, index: int, origin: _Origin) -> _Origin:
        """What of a parameter the outputs of a node are that reads it as this input."""
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
        """Whether numbers multiply a parameter one by one, zeros perhaps among them."""
        mark = PruningMark.of(node)
        if mark is not None:
            return "changing" if mark.changes else "fixed"
        others = (value for place, value in enumerate(node.inputs) if place != index and value is not None)
        constants = (value for value in others if value not in self._origins and len(shape) > 1)
        chooses = node.op_type in ("Mul", "Where") and any(static_shape(value) == shape for value in constants)
        return "changing" if chooses else origin.masked


def _operands(node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
    """The values that a node reads by input, and those that the bodies of its attributes read from around it, as input -1."""
    yield from ((index, value) for index, value in enumerate(node.inputs) if value is not None)
    yield from ((-1, value) for value in captured_by(node))


def _reshaped(origin: _Origin, shape: tuple[int, ...], following: tuple[int, ...]) -> _Origin:
    """What of a parameter a value is after a Reshape from one shape to another."""
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
    # Of a matrix that makes a weight together with another one, and has none of its inputs: what the two sum over.
    return known or (() if meeting.origin.contracted is None else (meeting.origin.contracted,))


def _summed_by(equation: str, operand: int, axes: Axes) -> Axes:
    """The axes of an operand of an Einsum that its result has not."""
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")[operand] if operand >= 0 else ""
    if not result or len(letters) != len(axes) or not letters.isalpha():
        return ()
    return tuple(axis for letter, axis in zip(letters, axes, strict=True) if letter not in result)
