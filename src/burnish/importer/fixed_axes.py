"""Open axes of inputs whose only possible extent is the length of a layer's parameters.

A file may leave the channels of its input open, and a layer has scales for four of them. With another extent a runtime reads past
the scales, stretches one channel over four, or fails in a node of its own. The axis is therefore fixed to that length when the
model is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from burnish.graph import attribute_value, bodies, describe_node, static_dimension

FIXED_BY = "burnish.fixed_by"
"""In the ``meta`` of an input: by axis, the layer that leaves one extent alone, in words."""

_PER_CHANNEL = {"BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2)}
_OVER_LAST_AXES = {"LayerNormalization": (1, 2), "RMSNormalization": (1,), "PRelu": (1,)}
_RECURRENT = ("GRU", "LSTM", "RNN")
_CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "ConvTranspose": 1, "QLinearConv": 3}
_PRODUCTS = {"Gemm": 1, "MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3}
"""By operator, which operand the second factor is."""


class _Same(NamedTuple):
    """An axis of an operand that has the extent of an axis of another one, or so many times that."""

    operand: int
    axis: int
    parameter: int
    place: int
    times: int = 1


def fix_layer_axes(model: ir.Model) -> bool:
    """Fix, in place, open axes of inputs that a layer takes in one extent alone.

    The inputs keep in their ``meta`` which layer that is (``FIXED_BY``).

    Returns:
        Whether there was any; the shapes that follow from the inputs are then to be inferred again.
    """
    graph = model.graph
    asked = _asked_by(graph)
    has_any = False
    for value in graph.inputs:
        dims = [] if value.shape is None else list(value.shape.dims)
        fixed = {axis: asked[dim.value] for axis, dim in enumerate(dims) if not isinstance(dim, int) and dim.value in asked}
        if fixed:
            value.meta[FIXED_BY] = {axis: reason for axis, (_, reason) in fixed.items()}
            value.shape = ir.Shape([fixed[axis][0] if axis in fixed else dim for axis, dim in enumerate(dims)])
            has_any = True
    return has_any


def _asked_by(graph: ir.Graph) -> dict[str | None, tuple[int, str]]:
    """Return open dimensions that layers of a graph take in one extent, with that and the reason.

    A dimension of a name is the one of the inputs in bodies, too. Of branches, those count that every branch asks for.
    """
    asked: dict[str | None, tuple[int, str]] = {}
    for node in graph:
        for dimension, extent, reason in _extents_of(node):
            asked.setdefault(dimension, (extent, reason))
        first, *others = [_asked_by(body) for body in bodies(node)] or [{}]
        for name, found in first.items():
            if all(name in other and other[name][0] == found[0] for other in others):
                asked.setdefault(name, found)
    return asked


def _extents_of(node: ir.Node) -> Iterator[tuple[str, int, str]]:
    """Give open dimensions of what a layer reads, the extent that its parameters leave, and why."""
    if node.domain != "":
        return
    for same in _same_extents(node):
        x, parameter = node.inputs[same.operand], node.inputs[same.parameter]
        assert x is not None
        assert x.shape is not None
        assert parameter is not None
        assert parameter.shape is not None
        extent, dimension = static_dimension(parameter.shape, same.place), x.shape.dims[same.axis]
        if extent is None or isinstance(dimension, int) or dimension.value is None:
            continue
        lengths = ", ".join(str(size if isinstance(size, int) else size.value) for size in parameter.shape.dims)
        groups = f", in {same.times} groups" if same.times > 1 else ""
        reason = f"{describe_node(node)} takes {extent * same.times} there: its '{parameter.name}' is [{lengths}]{groups}"
        yield dimension.value, extent * same.times, reason


def _same_extents(node: ir.Node) -> Iterator[_Same]:
    """Give what an operator asks of the axes of its operands."""
    rank = _rank(node, 0)
    if rank is None:
        return
    kind = node.op_type
    for index in _PER_CHANNEL.get(kind, ()):
        if rank > 1 and _rank(node, index) == 1:
            yield _Same(0, 1, index, 0)
    for index in _OVER_LAST_AXES.get(kind, ()):
        length = _rank(node, index) or 0
        first = 0 if kind == "PRelu" else attribute_value(node, "axis", -1) % rank
        for axis in range(max(first, rank - length), rank):
            # One scale may stand for all elements of a row, but never for all channels.
            if static_dimension(_shape(node, index), axis - rank) != 1:
                yield _Same(0, axis, index, axis - rank)
    if kind in _RECURRENT and rank == 3:
        of_states = [_Same(index, 2, 2, 2) for index in (5, 6) if _rank(node, index) == 3 and _rank(node, 2) == 3]
        yield from ([_Same(0, 2, 1, 2)] if _rank(node, 1) == 3 else []) + of_states
    weight = _CONVOLUTIONS.get(kind, 0)
    if weight and rank > 2 and _rank(node, weight) == rank:
        is_transposed = kind == "ConvTranspose"
        yield _Same(0, 1, weight, 0 if is_transposed else 1, 1 if is_transposed else attribute_value(node, "group", 1))
    second = _PRODUCTS.get(kind, 0)
    others = _rank(node, second) if second else None
    if second and others:
        left = -1 if kind != "Gemm" or not attribute_value(node, "transA", 0) else 0
        right = 0 if others == 1 else -2 if kind != "Gemm" or not attribute_value(node, "transB", 0) else -1
        yield _Same(0, left, second, right)
        yield _Same(second, right, 0, left)
    if kind == "Einsum" and "." not in (equation := attribute_value(node, "equation", "")):
        terms = equation.replace(" ", "").partition("->")[0].split(",")
        places = [(operand, axis, letter) for operand, term in enumerate(terms) for axis, letter in enumerate(term)]
        for (operand, axis, letter), (other, place, again) in itertools.permutations(places, 2):
            if letter == again and operand != other:
                yield _Same(operand, axis, other, place)


def _shape(node: ir.Node, index: int) -> ir.Shape | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else value.shape


def _rank(node: ir.Node, index: int) -> int | None:
    """The rank of an operand; None where there is none, or it is not known."""
    shape = _shape(node, index)
    return None if shape is None else len(shape)
