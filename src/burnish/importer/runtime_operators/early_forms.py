"""Operators that ONNX Runtime had before the standard, or with an additional operand."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, channels_first, channels_last, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank


@rewrites("ExpandDims")
def expand_dims(op: Operation) -> Results:
    """Insert an axis at a constant position."""
    axis = op.required(1).array
    return None if axis is None else op.builder.op("Unsqueeze", op.input, op.builder.integers([int(axis.item())]))


@rewrites("Range")
def range_of(op: Operation) -> Tensor:
    """Emit a range with a default step of one."""
    builder = op.builder
    start, limit, step = (
        None if bound is None else builder.op("Reshape", bound, builder.integers([])) if bound.rank == 1 else bound
        for bound in (op.input, op.required(1), op.optional(2))
    )
    assert start is not None
    return builder.op("Range", start, limit, builder.scalar(1, start) if step is None else step)


@rewrites("Pad")
def pad(op: Operation) -> Tensor:
    return op.builder.op("Pad", op.input, op.required(1), op.optional(2), mode=op.attribute("mode", "constant"))


@rewrites("GatherND")
def gather_nd(op: Operation) -> Tensor:
    return op.builder.op("GatherND", op.input, op.required(1))


@rewrites("BiasSoftmax")
def bias_softmax(op: Operation) -> Tensor:
    """Emit the softmax of a sum over all axes from ``axis`` on."""
    builder, total = op.builder, op.input + op.required(1)
    rank = known_rank(op, total)
    axis = op.attribute("axis", 1) % rank
    if axis == rank - 1:
        return builder.op("Softmax", total, axis=-1)
    flat = builder.op("Softmax", builder.op("Flatten", total, axis=axis), axis=-1)
    return builder.op("Reshape", flat, builder.op("Shape", total))


@rewrites("NhwcMaxPool")
def max_pool(op: Operation) -> Tensor:
    """Emit max pooling with channels last."""
    names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    attributes = {name: op.attribute(name) for name in names}
    return channels_last(op, op.builder.op("MaxPool", channels_first(op, op.input), **attributes))
