"""Operators that change only a tensor's shape or the order of its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor, zeros_like
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.positions import (
    INT64_MIN,
    add_at_positions,
    extent,
    flat_positions,
    joined,
    pad_or_crop,
    reshape_as,
    reshape_to,
)
from burnish.operators.registry import Operation, Operator, Precision

LARGEST_EXTENT = 2**62
"""Larger than the extent of any tensor."""


def reshape(op: Operation, dy: Tensor) -> Tensor:
    return reshape_as(dy, op.input)


def transpose(op: Operation, dy: Tensor) -> Tensor:
    permutation = op.attribute("perm")
    inverse = None if permutation is None else [int(axis) for axis in np.argsort(permutation)]
    return op.builder.op("Transpose", dy, perm=inverse, like=op.input)


def expand(op: Operation, dy: Tensor) -> Tensor:
    return dy


def concat(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of Concat, parts of dy: one Split if every part is needed, otherwise a Slice for each needed part."""
    axis = int(op.attribute("axis"))
    builder = op.builder
    parts = [op.required(index) for index in range(len(op.inputs))]
    if len(parts) == 1:
        return (dy,)
    if all(op.wants(index) for index in range(len(parts))):
        pieces = builder.op("Split", dy, joined(builder, [extent(part, axis) for part in parts]), axis=axis, outputs=len(parts))
        return tuple(_with_shape_of(piece, part) for piece, part in zip(pieces, parts, strict=True))
    gradients: list[Tensor | None] = []
    start: int | Tensor = 0
    for index, part in enumerate(parts):
        if not any(op.wants(later) for later in range(index, len(parts))):
            gradients.append(None)
            continue
        known = part.dimension(axis)
        size = extent(part, axis) if known is None else known
        end = _sum(start, size)
        gradients.append(_slice_of(dy, axis, start, end, part) if op.wants(index) else None)
        start = end
    return tuple(gradients)


def split(op: Operation, *cotangents: Tensor | None) -> Tensor:
    """The gradient of Split: dy of every part, joined; zeros for a part that nothing depends on."""
    axis = int(op.attribute("axis", 0))
    present = [
        cotangent if cotangent is not None else zeros_like(part) for cotangent, part in zip(cotangents, op.outputs, strict=True)
    ]
    return op.builder.op("Concat", *present, axis=axis, like=op.input)


def slice_(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of Slice: zeros around dy, and between its elements if the step is not 1."""
    x, builder = op.input, op.builder
    starts = op.required(1)
    number = None if starts.shape is None else starts.dimension(0)
    axes = _integers(op.optional(3), None if number is None else list(range(number)))
    steps = _integers(op.optional(4), None if axes is None else [1] * len(axes))
    if axes is None or steps is None or (x.rank is None and any(step != 1 for step in steps)):
        positions = builder.op("Slice", flat_positions(x), *op.inputs[1:])
        return add_at_positions(dy, positions, x)
    if x.rank is not None:
        axes = [axis % x.rank for axis in axes]
    backward = [axis for axis, step in zip(axes, steps, strict=True) if step < 0]
    if backward:
        dy = builder.op(
            "Slice",
            dy,
            builder.integers([-1] * len(backward)),
            builder.integers([INT64_MIN] * len(backward)),
            builder.integers(backward),
            builder.integers([-1] * len(backward)),
            like=dy,
        )
    spaced = _spaced(dy, axes, [abs(step) for step in steps])
    known = [(x.dimension(axis), dy.dimension(axis)) for axis in axes]
    constant_starts = _integers(starts, None)
    if constant_starts is not None and all(None not in pair for pair in known):
        begins, ends = [], []
        for start, step, (size, taken) in zip(constant_starts, steps, known, strict=True):
            assert size is not None
            assert taken is not None
            first = _first(start, step, size, taken)
            begins.append(first)
            ends.append(size - first - taken * abs(step))
        return _with_shape_of(pad_or_crop(spaced, axes, begins, ends), x)
    pads = _pads_at_run_time(x, dy, spaced, axes, steps, starts, constant_starts)
    return builder.op("Pad", spaced, pads, None, builder.integers(axes), like=x)


def pad(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of Pad. Constant mode: dy without the padding. Other modes copy elements of x: dy is added to these."""
    x, pads, axes, builder = op.input, op.required(1), op.optional(3), op.builder
    if op.attribute("mode", "constant") != "constant":
        positions = builder.op("Pad", flat_positions(x), pads, None, axes, mode=op.attribute("mode"))
        return (add_at_positions(dy, positions, x),)
    amounts = _integers(pads, None)
    if amounts is not None and any(abs(amount) > LARGEST_EXTENT for amount in amounts):
        raise GradientError(f"{op} pads by {amounts}, and no tensor has such an extent: export the model again")
    along = _integers(axes, None if x.rank is None else list(range(x.rank)))
    dx = None
    if op.wants(0):
        if amounts is not None and along is not None:
            half = len(along)
            dx = pad_or_crop(dy, along, [-amount for amount in amounts[:half]], [-amount for amount in amounts[half:]])
            dx = _with_shape_of(dx, x)
        else:
            dx = builder.op("Pad", dy, -pads, None, axes, like=x)
    dvalue = None
    if op.wants(2):
        inside = builder.op("Pad", dy, builder.op("Min", -pads, builder.integers([0])), None, axes)
        dvalue = builder.op("ReduceSum", dy, keepdims=0) - builder.op("ReduceSum", inside, keepdims=0)
        dvalue = reshape_as(dvalue, op.required(2))
    return dx, None, dvalue


def tile(op: Operation, dy: Tensor) -> Tensor:
    """The sum over the copies: dy as [repeats, extent] along every axis, summed over the repeats."""
    x, repeats, builder = op.input, op.required(1), op.builder
    times = _integers(repeats, None)
    if times is not None and all(number == 1 for number in times):
        return dy
    if times is not None and x.shape is not None:
        shape: list[int | Callable[[], Tensor]] = []
        summed = []
        for axis, number in enumerate(times):
            if number != 1:
                summed.append(len(shape))
                shape.append(number)
            shape.append(_size(x, axis))
        return builder.op("ReduceSum", reshape_to(dy, shape), builder.integers(summed), keepdims=0, like=x)
    columns = [builder.op("Unsqueeze", vector, builder.integers([1])) for vector in (repeats, builder.op("Shape", x))]
    interleaved = builder.op("Reshape", builder.op("Concat", *columns, axis=1), builder.integers([-1]))
    copies = builder.op("Reshape", dy, interleaved, allowzero=1)
    zero, two = (builder.scalar(number, ir.DataType.INT64) for number in (0, 2))
    axes = builder.op("Range", zero, builder.op("Size", repeats) * 2, two)
    return builder.op("ReduceSum", copies, axes, keepdims=0, like=x)


def space_to_depth(op: Operation, dy: Tensor) -> Tensor:
    """DepthToSpace is the inverse in either mode; before opset 28 there is only one mode."""
    mode = op.attribute("mode", "DCR")
    return op.builder.op("DepthToSpace", dy, blocksize=op.attribute("blocksize"), mode=mode, like=op.input)


def depth_to_space(op: Operation, dy: Tensor) -> Tensor:
    """SpaceToDepth puts the block before the channel; mode CRD has it after, so these two axes are swapped."""
    x, builder, block = op.input, op.builder, int(op.attribute("blocksize"))
    if op.attribute("mode", "DCR") == "DCR":
        return builder.op("SpaceToDepth", dy, blocksize=block, like=x)
    channels = builder.integers([0, block * block]), extent(dy, 1), builder.integers([-1])
    blocks_first = builder.op("Reshape", builder.op("SpaceToDepth", dy, blocksize=block), joined(builder, channels))
    return reshape_as(builder.op("Transpose", blocks_first, perm=[0, 2, 1, 3]), x)


def trilu(op: Operation, dy: Tensor) -> Tensor:
    return op.builder.op("Trilu", dy, op.optional(1), upper=op.attribute("upper", 1), like=op.input)


def reverse_sequence(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of ReverseSequence: its own inverse."""
    axes = {name: op.attribute(name) for name in ("batch_axis", "time_axis")}
    return op.builder.op("ReverseSequence", dy, op.required(1), like=op.input, **axes)


def _integers(tensor: Tensor | None, default: list[int] | None) -> list[int] | None:
    """Return a constant vector as Python integers; ``default`` if the input is omitted, None if known only at run time."""
    if tensor is None:
        return default
    array = tensor.array
    return None if array is None else [int(number) for number in array.reshape(-1)]


def _with_shape_of(tensor: Tensor, like: Tensor) -> Tensor:
    if like.shape is not None:
        tensor.value.shape = ir.Shape(like.shape.dims)
    return tensor


def _sum(left: int | Tensor, right: int | Tensor) -> int | Tensor:
    if isinstance(left, Tensor):
        return left + right
    return right if left == 0 else left + right


def _slice_of(tensor: Tensor, axis: int, start: int | Tensor, end: int | Tensor, like: Tensor) -> Tensor:
    builder = tensor.builder
    bounds = [builder.integers([bound]) if isinstance(bound, int) else bound for bound in (start, end)]
    return builder.op("Slice", tensor, *bounds, builder.integers([axis]), like=like)


def _size(tensor: Tensor, axis: int, factor: int = 1) -> int | Callable[[], Tensor]:
    """Return ``factor`` times the extent along an axis, or a function that emits it."""
    known = tensor.dimension(axis)
    if known is not None:
        return known * factor
    return lambda: extent(tensor, axis) if factor == 1 else extent(tensor, axis) * factor


def _spaced(dy: Tensor, axes: Sequence[int], steps: Sequence[int]) -> Tensor:
    sparse = sorted((axis, step) for axis, step in zip(axes, steps, strict=True) if step != 1)
    if not sparse:
        return dy
    builder = dy.builder
    inner = [axis + 1 + place for place, (axis, _) in enumerate(sparse)]
    zeros = [0] * len(sparse) + [step - 1 for _, step in sparse]
    cells = builder.op(
        "Pad", builder.op("Unsqueeze", dy, builder.integers(inner)), builder.integers(zeros), None, builder.integers(inner)
    )
    factors = dict(sparse)
    return reshape_to(cells, [_size(dy, axis, factors.get(axis, 1)) for axis in range(dy.rank or 0)])


def _first(start: int, step: int, size: int, taken: int) -> int:
    if taken == 0:
        return 0
    start = start + size if start < 0 else start
    if step > 0:
        return min(max(start, 0), size)
    return min(max(start, 0), size - 1) + (taken - 1) * step


def _pads_at_run_time(
    x: Tensor, dy: Tensor, spaced: Tensor, axes: Sequence[int], steps: Sequence[int], starts: Tensor, constant: list[int] | None
) -> Tensor:
    builder = x.builder
    sizes = joined(builder, [extent(x, axis) for axis in axes])
    lengths = joined(builder, [extent(spaced, axis) for axis in axes])
    if constant is not None and all(start >= 0 and step > 0 for start, step in zip(constant, steps, strict=True)):
        first = builder.op("Min", builder.integers(constant), sizes)
    else:
        starts = builder.cast(starts, ir.DataType.INT64)
        first = builder.op("Where", builder.op("Less", starts, 0), starts + sizes, starts)
        last = sizes - builder.integers([int(step < 0) for step in steps])
        first = builder.op("Min", builder.op("Max", first, 0), last)
        if any(step < 0 for step in steps):
            taken = joined(builder, [extent(dy, axis) for axis in axes])
            lowest = first + (taken - 1) * builder.integers([min(step, 0) for step in steps])
            first = builder.op("Where", builder.op("Equal", taken, 0), builder.integers([0]), lowest)
    return builder.op("Concat", first, sizes - lengths - first, axis=0)


def center_crop_pad(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """Its own adjoint: cropped parts are padded with zeros, and padding is cropped."""
    x, axes = op.required(0), op.attribute("axes")
    if axes is None:
        extents = op.builder.op("Shape", x)
    elif x.rank is None:
        extents = op.builder.op("Gather", op.builder.op("Shape", x), op.builder.integers(axes), axis=0)
    else:
        extents = joined(op.builder, [extent(x, axis % x.rank) for axis in axes])
    return (op.builder.op("CenterCropPad", dy, extents, axes=axes, like=x),)


OPERATORS = [
    Operator("Reshape", gradient=reshape, axes=axis_rules.reshape, precision=Precision.FOLLOWS, reopen=reopen_rules.reshape),
    Operator("Flatten", gradient=reshape, axes=axis_rules.flatten, precision=Precision.FOLLOWS, reopen=reopen_rules.flatten),
    Operator("Squeeze", gradient=reshape, axes=axis_rules.squeeze, precision=Precision.FOLLOWS, reopen=reopen_rules.squeeze),
    Operator(
        "Unsqueeze", gradient=reshape, axes=axis_rules.unsqueeze, precision=Precision.FOLLOWS, reopen=reopen_rules.unsqueeze
    ),
    Operator(
        "Transpose", gradient=transpose, axes=axis_rules.transpose, precision=Precision.FOLLOWS, reopen=reopen_rules.transpose
    ),
    Operator("Expand", gradient=expand, axes=axis_rules.expand, precision=Precision.FOLLOWS, reopen=reopen_rules.expand),
    Operator("Concat", gradient=concat, axes=axis_rules.concat, precision=Precision.FOLLOWS, reopen=reopen_rules.concat),
    Operator(
        "Split",
        gradient=split,
        axes=axis_rules.split,
        precision=Precision.FOLLOWS,
        reopen=partial(reopen_rules.along_axis, default=0),
    ),
    Operator("Slice", gradient=slice_, axes=axis_rules.slice_, precision=Precision.FOLLOWS, reopen=reopen_rules.slice_),
    Operator("Pad", gradient=pad, axes=axis_rules.pad, precision=Precision.FOLLOWS, reopen=reopen_rules.pad),
    Operator("Tile", gradient=tile, axes=axis_rules.tile, precision=Precision.FOLLOWS, reopen=reopen_rules.tile),
    Operator(
        "SpaceToDepth", gradient=space_to_depth, axes=axis_rules.image, precision=Precision.FOLLOWS, reopen=reopen_rules.images
    ),
    Operator(
        "DepthToSpace", gradient=depth_to_space, axes=axis_rules.image, precision=Precision.FOLLOWS, reopen=reopen_rules.images
    ),
    Operator("Trilu", gradient=trilu, axes=axis_rules.like_first, precision=Precision.FOLLOWS, reopen=reopen_rules.matrices),
    Operator(
        "ReverseSequence", gradient=reverse_sequence, axes=axis_rules.reversed_sequence, reopen=reopen_rules.reversed_sequence
    ),
    Operator("CenterCropPad", gradient=center_crop_pad, axes=axis_rules.resized, reopen=reopen_rules.center_crop_pad),
    Operator("Shape", axes=axis_rules.shape, reopen=reopen_rules.shape),
    Operator("Size", axes=axis_rules.scalar, reopen=reopen_rules.size),
    Operator("ConstantOfShape", axes=axis_rules.filled),
]
