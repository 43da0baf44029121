"""Deformable convolution (DeformConv): sampling points are moved by offsets and weighted by a mask.

Dai et al. 2017, "Deformable Convolutional Networks", and Zhu et al. 2019 with the mask. Reads are linear between elements, and
zero outside the data. ``DeformConvGrad(dy, x, w, offset, mask) -> dx, dw, doffset, dmask`` is a semantic operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import SIXTEEN_BIT, Tensor
from burnish.graph.uses import is_used
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.interpolation import LINEAR, Reading, of_extent, range_of, shaped, size_of, taps_around
from burnish.operators.positions import reshape_as
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import Operands, OutputType, SemanticOperator
from burnish.operators.windows import Windows


def _like_the_operands(operands: Operands) -> list[OutputType]:
    return [OutputType.of(tensor) for tensor in operands.tensors[1:] if tensor is not None]


def deformable_convolution(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for the data, the weights, the offsets (which move the sampling points), the bias and the mask."""
    x, w, offset = (op.required(index) for index in range(3))
    bias, mask, dbias = op.optional(3), op.optional(4), None
    if bias is not None and op.wants(3):
        spatial = Windows.declared(op).rank
        dbias = op.builder.op("ReduceSum", dy, op.builder.integers([0, *range(2, spatial + 2)]), keepdims=0, like=bias)
    if not any(op.wants(index) for index in (0, 1, 2, 4)):
        return None, None, None, dbias, None
    if offset.rank is None or x.rank is None:
        raise GradientError(
            f"{op}: the ranks of its inputs '{x.name}' and '{offset.name}' are not known; "
            "declare the shapes of the model's inputs"
        )
    attributes = {**Windows.declared(op).attributes(), "group": op.attribute("group", 1)}
    attributes["offset_group"] = op.attribute("offset_group", 1)
    dx, dw, doffset, *rest = DEFORM_CONV_GRAD.emit(dy, x, w, offset, mask, **attributes)
    return dx, dw, doffset, dbias, rest[0] if rest else None


def lower_deform_conv_grad(op: Operation) -> tuple[Tensor | None, ...]:
    """y = w columns, with columns sampled at the points and weighted by the mask: a product, and the adjoint of sampling.

    Points are ``[N, offset groups, kernel, outputs]``, M in total; each point reads C / offset groups numbers.
    """
    builder, dtype = op.builder, op.required(1).dtype
    precision = ir.DataType.FLOAT if dtype in SIXTEEN_BIT else dtype
    dy, x, w, offset = (builder.cast(op.required(index), precision) for index in range(4))
    mask = op.optional(4)
    shapes = _Shapes(op, x, w, offset)
    reading, rows = _points(op, x, offset, shapes), shapes.rows_of(x)
    weighing = None if mask is None else builder.op("Reshape", builder.cast(mask, precision), builder.integers([-1, 1]))
    dcolumns = shapes.points_of(_transposed_product(w, dy, shapes))
    dread = dcolumns if weighing is None else dcolumns * weighing
    received = builder.op("Unsqueeze", dread, builder.integers([1]))
    dx = dw = doffset = dmask = None
    wanted = [is_used(output) for output in op.node.outputs]
    if wanted[0]:
        given = reading.given_back(received * builder.op("Unsqueeze", reading.weights, builder.integers([2])), rows)
        dx = reshape_as(builder.op("Transpose", shaped(given, shapes.rows), perm=[0, 1, 3, 2]), x)
    if wanted[1] or (mask is not None and wanted[3]):
        read = reading.read(rows)
        columns = shapes.columns_of(read if weighing is None else read * weighing)
        by_image = builder.op("MatMul", shapes.grouped(dy), builder.op("Transpose", columns, perm=[0, 1, 3, 2]))
        dw = reshape_as(builder.op("ReduceSum", by_image, builder.integers([0]), keepdims=0), w)
        if mask is not None:
            dmask = reshape_as(builder.op("ReduceSum", dcolumns * read, builder.integers([1]), keepdims=0), mask)
    if wanted[2]:
        by_tap = builder.op("ReduceSum", reading.values(rows) * received, builder.integers([2]), keepdims=0)
        moved = [shaped(reading.moved(by_tap, axis), [*shapes.points[:3], 1, shapes.outputs]) for axis in range(shapes.axes)]
        doffset = reshape_as(builder.op("Concat", *moved, axis=3), offset)
    gradients = (dx, dw, doffset, dmask)[: len(op.node.outputs)]
    return tuple(None if tensor is None else builder.cast(tensor, dtype) for tensor in gradients)


class _Shapes:
    """The extents of a deformable convolution, each an int or an int64 scalar, and reshapes of its tensors."""

    def __init__(self, op: Operation, x: Tensor, w: Tensor, offset: Tensor):
        self.kernel = Windows.declared(op).kernel_shape
        self.axes = len(self.kernel)
        self.offset_groups, self._groups = int(op.attribute("offset_group", 1)), int(op.attribute("group", 1))
        self.images, channels = size_of(x, 0), size_of(x, 1)
        self.spatial = [size_of(x, axis + 2) for axis in range(self.axes)]
        self.output = [size_of(offset, axis + 2) for axis in range(self.axes)]
        self.outputs, elements = _product(self.output), _product(self.spatial)
        self.read_together = _divided(channels, self.offset_groups)
        self.points = [self.images, self.offset_groups, prod(self.kernel), self.outputs]
        self.rows = [self.images, self.offset_groups, elements, self.read_together]
        self._terms = _times(_divided(channels, self._groups), prod(self.kernel))
        self._channels_out = _divided(size_of(w, 0), self._groups)

    def rows_of(self, x: Tensor) -> Tensor:
        """``[N * offset groups * elements, C / offset groups]``."""
        builder = x.builder
        by_group = shaped(x, [self.images, self.offset_groups, self.read_together, self.rows[2]])
        last = builder.op("Transpose", by_group, perm=[0, 1, 3, 2])
        return shaped(last, [_times(_times(self.images, self.offset_groups), self.rows[2]), self.read_together])

    def columns_of(self, read: Tensor) -> Tensor:
        """Reshape the values read at the points to ``[N, groups, C / groups * kernel, outputs]``."""
        by_point = shaped(read, [*self.points, self.read_together])
        first = read.builder.op("Transpose", by_point, perm=[0, 1, 4, 2, 3])
        return shaped(first, [self.images, self._groups, self._terms, self.outputs])

    def points_of(self, columns: Tensor) -> Tensor:
        """The inverse: ``[M, C / offset groups]``."""
        by_group = shaped(columns, [self.images, self.offset_groups, self.read_together, *self.points[2:]])
        last = columns.builder.op("Transpose", by_group, perm=[0, 1, 3, 4, 2])
        points = self.points[0]
        for number in self.points[1:]:
            points = _times(points, number)
        return shaped(last, [points, self.read_together])

    def grouped(self, dy: Tensor) -> Tensor:
        """``[N, groups, outputs' channels / groups, outputs]``."""
        return shaped(dy, [self.images, self._groups, self._channels_out, self.outputs])

    def weights(self, w: Tensor) -> Tensor:
        """``[groups, outputs' channels / groups, C / groups * kernel]``."""
        return shaped(w, [self._groups, self._channels_out, self._terms])


def _transposed_product(w: Tensor, dy: Tensor, shapes: _Shapes) -> Tensor:
    """w^T dy, ``[N, groups, C / groups * kernel, outputs]``."""
    builder = w.builder
    return builder.op("MatMul", builder.op("Transpose", shapes.weights(w), perm=[0, 2, 1]), shapes.grouped(dy))


def _points(op: Operation, x: Tensor, offset: Tensor, shapes: _Shapes) -> Reading:
    """Return the points: the window positions of a convolution, moved by the offsets."""
    builder, windows, axes = op.builder, Windows.declared(op), shapes.axes
    moves = shaped(offset, [shapes.images, shapes.offset_groups, *shapes.kernel, axes, *shapes.output])
    taps = []
    for axis in range(axes):
        inside = np.arange(shapes.kernel[axis]) * windows.dilations[axis] - windows.pads_begin[axis]
        starts = range_of(shapes.output[axis], builder) * windows.strides[axis]
        kernel_place, output_place = [1] * 2 * axes, [1] * 2 * axes
        kernel_place[axis], output_place[axes + axis] = -1, -1
        places = builder.constant(inside.reshape(kernel_place)) + builder.op("Reshape", starts, builder.integers(output_place))
        along = builder.op("Gather", moves, builder.scalar(axis, ir.DataType.INT64), axis=2 + axes)
        position = builder.op("Reshape", along + builder.cast(places, x.dtype), builder.integers([-1]))
        last = of_extent(x, axis + 2, lambda size: size - 1, x.dtype)
        taps.append(taps_around(position, LINEAR, last, None))
    groups = range_of(_times(shapes.images, shapes.offset_groups), builder) * shapes.rows[2]
    first = shaped(groups, [shapes.images, shapes.offset_groups, 1, 1])
    each = builder.op("Expand", first, _vector(op, shapes.points))
    return Reading.of(taps, shapes.spatial, builder.op("Reshape", each, builder.integers([-1, 1])))


def _vector(op: Operation, extents: Sequence[int | Tensor]) -> Tensor:
    builder = op.builder
    if all(isinstance(extent, int) for extent in extents):
        return builder.integers([extent for extent in extents if isinstance(extent, int)])
    one = builder.integers([1])
    parts = [builder.integers([part]) if isinstance(part, int) else builder.op("Reshape", part, one) for part in extents]
    return builder.op("Concat", *parts, axis=0)


def _times(one: int | Tensor, other: int | Tensor) -> int | Tensor:
    return other * one if isinstance(one, int) else one * other


def _product(extents: Sequence[int | Tensor]) -> int | Tensor:
    result: int | Tensor = 1
    for extent in extents:
        result = extent if isinstance(result, int) and result == 1 else _times(result, extent)
    return result


def _divided(number: int | Tensor, by: int) -> int | Tensor:
    if isinstance(number, int):
        return number // by
    return number if by == 1 else number / by


DEFORM_CONV_GRAD = SemanticOperator(
    "DeformConvGrad",
    ("dy", "x", "w", "offset", "mask"),
    ("dx", "dw", "doffset", "dmask"),
    _like_the_operands,
    lowering=lower_deform_conv_grad,
)

OPERATORS = [
    Operator(
        "DeformConv",
        gradient=deformable_convolution,
        axes=axis_rules.moved_image,
        reopen=partial(reopen_rules.images, sampled=(0, 2, 4)),
    ),
    DEFORM_CONV_GRAD,
]
