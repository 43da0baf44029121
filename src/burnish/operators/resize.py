"""The gradient of Resize: interpolation along axes, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Builder, Tensor, same_dimension
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.positions import extent, joined
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like

INTERPOLATION = (
    "mode",
    "coordinate_transformation_mode",
    "nearest_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "antialias",
)
TARGET = ("axes", "keep_aspect_ratio_policy")


def resize(op: Operation, dy: Tensor) -> Tensor:
    """The adjoint of an operator that is linear in x; only the shape of x is read.

    The standard has no gradient for the region of interest and the scales. In ``tf_crop_and_resize``, the outside of the data is
    a constant, the extrapolation value, without gradient.
    """
    x, y = op.input, op.output
    if x.rank is None:
        raise GradientError(f"{op}: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs")
    if y.shape is not None:
        dy.value.shape = ir.Shape(y.shape.dims)
    return RESIZE_GRAD(dy, x, op.optional(2), op.optional(3), _region(op, 1), **_attributes(op))


def resize_double_backward(op: Operation, v: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint of the adjoint: Resize again, with zeros outside."""
    resized = op.builder.op("Resize", v, op.optional(4), op.optional(2), op.optional(3), like=op.input, **_attributes(op))
    return resized, *[None] * (len(op.inputs) - 1)


def lower_resize_grad(op: Operation) -> Tensor:
    """Along every axis y = A x with a matrix A of weights, and dx = A^T dy.

    A is the same operator's result for the identity matrix, so every mode has its gradient, as the runtime computes it.
    """
    dy, x, builder = op.required(0), op.required(1), op.builder
    y, rank = dy, x.rank or 0
    axes = [axis % rank for axis in op.attribute("axes", tuple(range(rank)))]
    for position in range(len(axes)):
        along = _Along(op, x, y, axes, position)
        if not along.is_unchanged:
            dy = _apply_transposed(builder, dy, along, rank)
    if x.shape is not None:
        dy.value.shape = ir.Shape(x.shape.dims)
    return dy


class _Along:
    """A Resize along one of its axes, the one at ``position`` in ``axes``."""

    def __init__(self, op: Operation, x: Tensor, y: Tensor, axes: Sequence[int], position: int):
        self._op, self._x, self._y = op, x, y
        self._axes, self._position, self.axis = axes, position, axes[position]
        self._scales, self._roi = op.optional(2), _region(op, 4)
        self._by_scale = self._scales is not None and self._scales.dimension(0) != 0
        self._keeps_ratio = not self._by_scale and op.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"

    @property
    def is_unchanged(self) -> bool:
        """True if the axis is known not to change; with one scale for all axes its extent does not tell."""
        if self._keeps_ratio:
            return False
        if self._roi is not None:
            bounds = self._roi.array
            if bounds is None or tuple(bounds[[self._position, self._position + len(self._axes)]]) != (0, 1):
                return False
        if self._by_scale:
            factors = None if self._scales is None else self._scales.array
            if factors is not None:
                return float(factors.reshape(-1)[self._position]) == 1.0
        shapes = self._x.shape, self._y.shape
        known = shapes[0] is not None and shapes[1] is not None
        return not self._by_scale and known and same_dimension(*(shape.dims[self.axis] for shape in shapes if shape is not None))

    def matrix(self, transposed: bool) -> Tensor:
        """Return the weights, A ``[resized, extent]`` or A^T: each row or column of the identity matrix resized."""
        builder = self._x.builder
        if self._keeps_ratio:
            matrix = self._beside_the_deciding_axis()
            return matrix if transposed else builder.op("Transpose", matrix, perm=[1, 0])
        size, target = extent(self._x, self.axis), extent(self._y, self.axis)
        identity = builder.op("Unsqueeze", self._identity(), builder.integers([0, 1]))
        place = 3 if transposed else 2
        scales = sizes = None
        if self._by_scale:
            factor, one = self._entry(self._scales, self._position), builder.constant(np.ones(1, np.float32))
            scales = builder.op("Concat", *[factor if axis == place else one for axis in range(4)], axis=0)
        else:
            sizes = joined(builder, [builder.integers([1, 1]), *([size, target] if transposed else [target, size])])
        resized = self._resized(identity, self._region(place, range(4)), scales, sizes)
        return builder.op("Squeeze", resized, builder.integers([0, 1]))

    def _beside_the_deciding_axis(self) -> Tensor:
        """Return A^T if one scale holds for all axes, that of the axis that ``sizes`` enlarges the least, or the most.

        The rows of the identity matrix become channels of images with this axis as height and that axis as width, so that the
        runtime finds the same scale; all columns are the same.
        """
        builder, policy = self._x.builder, self._op.attribute("keep_aspect_ratio_policy")
        targets = self._op.required(3)
        extents = builder.op("Gather", builder.op("Shape", self._x), builder.integers(self._axes), axis=0)
        ratios = builder.cast(targets, ir.DataType.FLOAT) / builder.cast(extents, ir.DataType.FLOAT)
        deciding = builder.op("ArgMin" if policy == "not_larger" else "ArgMax", ratios, axis=0, keepdims=1)
        width, width_target = (builder.op("Gather", numbers, deciding, axis=0) for numbers in (extents, targets))
        images = builder.op("Unsqueeze", self._identity(), builder.integers([0, 3]))
        images = builder.op("Expand", images, joined(builder, [builder.integers([1, 1, 1]), width]))
        sizes = joined(builder, [self._entry(targets, self._position), width_target])
        attributes = {"axes": (2, 3), "keep_aspect_ratio_policy": policy}
        resized = self._resized(images, self._region(2, (2, 3)), None, sizes, **attributes)
        column = builder.op("Gather", resized, builder.scalar(0, ir.DataType.INT64), axis=3)
        return builder.op("Squeeze", column, builder.integers([0]))

    def _region(self, place: int, axes: Sequence[int]) -> Tensor | None:
        """Return the region of interest for data with this axis at ``place``, and all of its other ``axes``."""
        if self._roi is None:
            return None
        builder, dtype = self._roi.builder, self._roi.dtype.numpy()
        bounds = []
        for whole, position in ((0, self._position), (1, self._position + len(self._axes))):
            bound, other = self._entry(self._roi, position), builder.constant(np.full(1, whole, dtype))
            bounds += [bound if axis == place else other for axis in axes]
        return builder.op("Concat", *bounds, axis=0)

    def _identity(self) -> Tensor:
        builder, size, dtype = self._x.builder, extent(self._x, self.axis), self._x.dtype
        square = builder.op("Concat", size, size, axis=0)
        zeros = builder.op("ConstantOfShape", square, value=ir.tensor(np.zeros(1, dtype.numpy())), dtype=dtype)
        return builder.op("EyeLike", zeros)

    def _resized(
        self, data: Tensor, roi: Tensor | None, scales: Tensor | None, sizes: Tensor | None, **attributes: Any
    ) -> Tensor:
        interpolation = {name: self._op.attribute(name) for name in INTERPOLATION}
        return data.builder.op("Resize", data, roi, scales, sizes, dtype=data.dtype, **interpolation, **attributes)

    def _entry(self, vector: Tensor | None, position: int) -> Tensor:
        assert vector is not None
        return vector.builder.op("Gather", vector, vector.builder.integers([position]), axis=0)


def _apply_transposed(builder: Builder, dy: Tensor, along: _Along, rank: int) -> Tensor:
    """Multiply by A^T along one axis: from the left for the second-to-last axis, otherwise from the right."""
    if along.axis == rank - 2:
        return builder.op("MatMul", along.matrix(transposed=True), dy)
    matrix = along.matrix(transposed=False)
    if along.axis == rank - 1:
        return builder.op("MatMul", dy, matrix)
    exchange = list(range(rank))
    exchange[along.axis], exchange[-1] = exchange[-1], exchange[along.axis]
    moved = builder.op("MatMul", builder.op("Transpose", dy, perm=exchange), matrix)
    return builder.op("Transpose", moved, perm=exchange)


def _attributes(op: Operation) -> dict[str, Any]:
    return {name: op.attribute(name) for name in (*INTERPOLATION, *TARGET)}


def _region(op: Operation, index: int) -> Tensor | None:
    return op.optional(index) if op.attribute("coordinate_transformation_mode") == "tf_crop_and_resize" else None


RESIZE_GRAD = SemanticOperator(
    "ResizeGrad",
    ("dy", "x", "scales", "sizes", "roi"),
    ("dx",),
    like("x"),
    gradient=resize_double_backward,
    lowering=lower_resize_grad,
)

OPERATORS = [
    Operator(
        "Resize", since=11, gradient=resize, axes=axis_rules.resized, precision=Precision.WIDENED, reopen=reopen_rules.resize
    ),
    RESIZE_GRAD,
    Operator("Upsample", axes=axis_rules.resized),
]
