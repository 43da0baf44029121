"""Pooling over windows of the spatial axes, in one to three dimensions; and Col2Im, which adds overlapping blocks to an image.

Two semantic gradient operators in the domain ``burnish`` store the window in explicit ``kernel_shape``, ``strides``,
``dilations`` and ``pads``:

- ``MaxPoolGrad(dy, indices, x) -> dx``: indices as from the standard's MaxPool, flat over the whole of x.
- ``AveragePoolGrad(dy, x) -> dx``: only the shape of x is read.

A maximum that occurs several times in a window counts once, at its first place, as in ONNX Runtime and PyTorch.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError, ModelError
from burnish.graph import Tensor, zeros_like
from burnish.graph.uses import is_used, producer_of
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.interpolation import range_of
from burnish.operators.positions import add_at_positions, count_like, extents, flat_positions, reshape_as
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like
from burnish.operators.windows import Windows
from burnish.untrusted_files import memory_excess


def max_pool(op: Operation, dy: Tensor | None, *_: Tensor | None) -> Tensor | None:
    if dy is None:
        return None
    x = op.input
    windows = Windows.of(op)
    if op.attribute("storage_order", 0) != 0 and len(op.outputs) > 1 and is_used(op.node.outputs[1]):
        # The model's Indices are column-major; the gradient needs row-major ones.
        names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
        indices = op.builder.op("MaxPool", x, outputs=2, **{name: op.attribute(name) for name in names})[1]
    else:
        op.node.attributes.pop("storage_order", None)
        indices = op.second_output(ir.DataType.INT64, op.output)
    return MAX_POOL_GRAD(dy, indices, x, **windows.attributes())


def lower_max_pool_grad(op: Operation) -> Tensor:
    """Add each element of dy at its maximum: by index, or by comparison if windows do not overlap.

    Comparison with the maxima, which needs no indices, takes 2.6 ms and a scatter 6.1 ms (1x64x112x112, 2x2 windows, ONNX Runtime
    on one thread). Overlapping windows gain nothing: 8.5 ms compared with 7.7 ms (3x3, stride 2).
    """
    dy, indices, x = op.required(0), op.required(1), op.required(2)
    windows, pool = Windows.of(op), producer_of(indices.value, "MaxPool")
    if pool is not None and pool.inputs[0] is x.value and are_apart(dy, x, windows):
        return to_first_maxima(dy, x, op.builder.tensor(pool.outputs[0]), windows)
    return add_at_positions(dy, indices, x)


def average_pool(op: Operation, dy: Tensor) -> Tensor:
    windows = Windows.of(op)
    return AVERAGE_POOL_GRAD(
        dy,
        op.input,
        count_include_pad=op.attribute("count_include_pad", 0),
        ceil_mode=op.attribute("ceil_mode", 0),
        **windows.attributes(),
    )


def lower_average_pool_grad(op: Operation) -> Tensor:
    """Divide dy by the divisor of each average, and spread it over the window."""
    dy, x = op.required(0), op.required(1)
    windows = Windows.of(op)
    included, rounded_up = bool(op.attribute("count_include_pad", 0)), bool(op.attribute("ceil_mode", 0))
    return spread(dy / counts(dy, x, windows, included, rounded_up), x, windows)


def lp_pool(op: Operation, dy: Tensor) -> Tensor:
    """y = (sum |x|^p)^(1/p): dx = sign(x) |x|^(p-1) sum over the windows of dy y^(1-p); zero if y is zero."""
    x, power = op.input, int(op.attribute("p", 2))
    return _power_slope(x, power) * spread(_norm_slope(dy, op.output, power), x, Windows.of(op))


def global_lp_pool(op: Operation, dy: Tensor) -> Tensor:
    x, power = op.input, int(op.attribute("p", 2))
    return _power_slope(x, power) * _norm_slope(dy, op.output, power)


def global_average_pool(op: Operation, dy: Tensor) -> Tensor:
    x, builder = op.input, op.builder
    return builder.op("Expand", dy / count_like(x, 2), builder.op("Shape", x), like=x)


def global_max_pool(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of GlobalMaxPool: dy goes to the first maximum of each channel."""
    x, builder = op.input, op.builder
    channels = builder.integers([0, 0, -1])
    rows = builder.op("Reshape", x, channels)
    places = builder.op("ArgMax", rows, axis=2, keepdims=1)
    return reshape_as(builder.op("ScatterElements", zeros_like(rows), places, builder.op("Reshape", dy, channels), axis=2), x)


def max_unpool(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """The gradient of MaxUnpool: each element gets dy from its target.

    If several elements have the same target (overlapping windows), only the last is in the output.
    """
    x, indices, builder = op.required(0), op.required(1), op.builder
    flat, positions = builder.integers([-1]), flat_positions(x)
    size = builder.op("Reshape", builder.op("Size", dy), flat)
    nobody = builder.op("ConstantOfShape", size, value=ir.tensor(np.full(1, -1, np.int64)), dtype=ir.DataType.INT64)
    places = builder.op("Reshape", indices, flat)
    writers = builder.op("ScatterElements", nobody, places, builder.op("Reshape", positions, flat), axis=0, reduction="max")
    is_last = builder.op("Equal", builder.op("Gather", writers, indices, axis=0), positions)
    received = builder.op("Gather", builder.op("Reshape", dy, flat), indices, axis=0)
    return (builder.op("Where", is_last, received, builder.scalar(0, dy), like=x),)


def _power_slope(x: Tensor, power: int) -> Tensor:
    if power == 2:
        return x
    sign = x.builder.op("Sign", x)
    return sign if power == 1 else sign * x.builder.op("Abs", x) ** float(power - 1)


def _norm_slope(dy: Tensor, y: Tensor, power: int) -> Tensor:
    """dy y^(1-p), and zero if y is zero: the subgradient of smallest norm."""
    if power == 1:
        return dy
    builder = y.builder
    is_zero = builder.op("Equal", y, 0)
    divisor = builder.op("Where", is_zero, builder.scalar(1, y), y if power == 2 else y ** float(power - 1))
    return builder.op("Where", is_zero, builder.scalar(0, y), dy / divisor)


def counts(dy: Tensor, x: Tensor, windows: Windows, include_pads: bool, rounded_up: bool) -> Tensor:
    """Return the divisor of each average: a scalar, or one number per window [spatial axes of dy].

    A window counts its elements inside x or, with ``include_pads``, inside the padded x: if the output size is rounded up, the
    last window may reach beyond, and those elements never count.
    """
    builder = dy.builder
    everywhere = math.prod(windows.kernel_shape)
    if not rounded_up and (include_pads or not any(windows.pads_begin + windows.pads_end)):
        return builder.scalar(everywhere, dy)
    outputs, inputs = extents(dy, 2), extents(x, 2)
    if outputs is not None and inputs is not None:
        total = np.ones((), np.int64)
        for axis in range(windows.rank):
            total = np.multiply.outer(total, _counts_along(windows, axis, outputs[axis], inputs[axis], include_pads))
        if (total == total.flat[0]).all():
            return builder.scalar(int(total.flat[0]), dy)
        return builder.constant(total.astype(dy.dtype.numpy()))
    result: Tensor | None = None
    for axis in range(windows.rank):
        along = _counts_along_at_run_time(dy, x, windows, axis, include_pads)
        column = builder.op("Reshape", along, builder.integers([-1] + [1] * (windows.rank - 1 - axis)))
        result = column if result is None else result * column
    assert result is not None
    return result


def spread(dy: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Add every element of dy to all positions of its window, in zeros of the shape of x: the adjoint of summing windows.

    Windows that tile x repeat their element: ``Resize`` takes 0.65 ms and a transposed convolution 3.5 ms (8x128x56x56, 2x2
    windows). Other windows are a transposed convolution with a kernel of ones and each channel as an image: 5 ms compared with
    12 ms in ONNX Runtime for spaced zeros and an AveragePool (16x64x56x56, 3x3 windows, stride 2, two cores).
    """
    builder = dy.builder
    rank = windows.rank
    if _tile(dy, x, windows):
        return _repeated(dy, x, windows)
    too_much = memory_excess(math.ceil(math.prod(windows.kernel_shape) * dy.dtype.itemsize))
    if too_much is not None:
        kernel = list(windows.kernel_shape)
        raise ModelError(f"the gradient of a pooling needs a constant of the shape {kernel} of its kernel: {too_much}")
    ones = builder.constant(np.ones((1, 1, *windows.kernel_shape), dy.dtype.numpy()))
    outputs, inputs = extents(dy, 2), extents(x, 2)
    if outputs is not None and inputs is not None:
        images = builder.op("Reshape", dy, builder.integers([-1, 1, *outputs]))
        full = [(outputs[axis] - 1) * windows.strides[axis] + windows.span(axis) for axis in range(rank)]
        excess = [full[axis] - windows.pads_begin[axis] - inputs[axis] for axis in range(rank)]
        image_gradients = builder.op(
            "ConvTranspose",
            images,
            ones,
            strides=windows.strides,
            dilations=windows.dilations,
            pads=[*windows.pads_begin, *(max(number, 0) for number in excess)],
            output_padding=[max(-number, 0) for number in excess],
        )
        return reshape_as(image_gradients, x)
    shape = builder.op("Concat", builder.integers([-1, 1]), builder.op("Shape", dy, start=2), axis=0)
    images = builder.op("Reshape", dy, shape)
    whole = builder.op("ConvTranspose", images, ones, strides=windows.strides, dilations=windows.dilations)
    axes = builder.integers(range(2, rank + 2))
    begins = builder.integers(windows.pads_begin)
    ends = builder.op("Shape", x, start=2) + begins
    missing = builder.op("Max", ends - builder.op("Shape", whole, start=2), builder.integers([0]))
    padded = builder.op("Pad", whole, builder.op("Concat", builder.integers([0] * rank), missing, axis=0), None, axes)
    return reshape_as(builder.op("Slice", padded, begins, ends, axes), x)


def are_apart(dy: Tensor, x: Tensor, windows: Windows) -> bool:
    """True if windows of static sizes are inside x without padding and do not overlap.

    False for dtypes other than float32: ONNX Runtime has the convolutions and ``Resize`` to use only for that.
    """
    outputs, inputs = extents(dy, 2), extents(x, 2)
    if dy.dtype != ir.DataType.FLOAT or outputs is None or inputs is None or any(windows.pads_begin + windows.pads_end):
        return False
    axes = range(windows.rank)
    ends = [(outputs[axis] - 1) * windows.strides[axis] + windows.span(axis) for axis in axes]
    return all(
        windows.span(axis) == windows.kernel_shape[axis] <= windows.strides[axis]
        and ends[axis] <= inputs[axis] < ends[axis] + windows.strides[axis]
        for axis in axes
    )


def _tile(dy: Tensor, x: Tensor, windows: Windows) -> bool:
    """True if every element of x, of static sizes, is in exactly one window; False if ONNX Runtime has no ``Resize`` for it."""
    inputs = extents(x, 2)
    return (
        are_apart(dy, x, windows)
        and windows.kernel_shape == windows.strides
        and inputs is not None
        and all(size % kernel == 0 for size, kernel in zip(inputs, windows.kernel_shape, strict=True))
    )


def _repeated(values: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Repeat one value per window over its elements, in the shape of x, which the windows tile."""
    builder = values.builder
    scales = builder.constant(np.array([1, 1, *windows.kernel_shape], np.float32))
    return builder.op(
        "Resize",
        values,
        None,
        scales,
        like=x,
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def to_first_maxima(dy: Tensor, x: Tensor, y: Tensor, windows: Windows) -> Tensor:
    """Return zeros of the shape of x, with each element of dy at the first element of its window equal to the maximum y.

    ``are_apart`` must be true for the windows.
    """
    return (_by_rank if _tile(dy, x, windows) else _by_tap)(dy, x, y, windows)


def _by_rank(dy: Tensor, x: Tensor, y: Tensor, windows: Windows) -> Tensor:
    """If windows tile x: rank elements by equality with the maximum, then by position; one per window ranks first.

    Ranks are multiples of a power of two below 2: exact, and all different in a window. No element is moved, which would take
    ONNX Runtime 2 ns each at a stride of two.
    """
    builder, taps = dy.builder, math.prod(windows.kernel_shape)
    inputs = extents(x, 2)
    assert inputs is not None
    order = np.arange(taps)[::-1] / 2 ** (taps - 1).bit_length()
    repeats = [size // kernel for size, kernel in zip(inputs, windows.kernel_shape, strict=True)]
    places = np.tile(order.reshape(windows.kernel_shape), repeats).astype(x.dtype.numpy())
    is_maximum = builder.op("Equal", x, _repeated(y, x, windows))
    ranks = builder.cast(is_maximum, x.dtype) + builder.constant(places)
    first = builder.op("MaxPool", ranks, kernel_shape=windows.kernel_shape, strides=windows.strides, like=y)
    is_first = builder.op("Equal", ranks, _repeated(first, x, windows))
    return _repeated(dy, x, windows) * builder.cast(is_first, dy.dtype)


def _by_tap(dy: Tensor, x: Tensor, y: Tensor, windows: Windows) -> Tensor:
    """Give each tap that equals the maximum the part of dy left by earlier taps.

    A transposed convolution with kernels that contain a single one puts the taps back in their places.
    """
    builder, taps = dy.builder, math.prod(windows.kernel_shape)
    outputs, inputs = extents(dy, 2), extents(x, 2)
    assert outputs is not None
    assert inputs is not None
    spatial, steps = builder.integers(range(2, windows.rank + 2)), builder.integers(windows.strides)
    image = builder.integers([-1, 1, *outputs])
    received = []
    for number, tap in enumerate(np.ndindex(*windows.kernel_shape)):
        parts = zip(tap, outputs, windows.strides, strict=True)
        ends = builder.integers([start + (count - 1) * stride + 1 for start, count, stride in parts])
        is_maximum = builder.op("Equal", builder.op("Slice", x, builder.integers(tap), ends, spatial, steps), y)
        taken = dy * builder.cast(is_maximum, dy.dtype)
        received.append(builder.op("Reshape", taken, image))
        if number < taps - 1:
            dy = dy - taken
    reaches = zip(outputs, windows.strides, windows.kernel_shape, strict=True)
    by_tap = builder.op("Concat", *received, axis=1)
    single = np.eye(taps).reshape(taps, 1, *windows.kernel_shape).astype(x.dtype.numpy())
    images = builder.op(
        "ConvTranspose",
        by_tap,
        builder.constant(single),
        strides=windows.strides,
        output_padding=[
            size - ((count - 1) * stride + kernel) for size, (count, stride, kernel) in zip(inputs, reaches, strict=True)
        ],
    )
    return reshape_as(images, x)


def _counts_along(windows: Windows, axis: int, outputs: int, size: int, include_pads: bool) -> np.ndarray:
    begin, end = windows.pads_begin[axis], windows.pads_end[axis]
    first = np.arange(outputs)[:, None] * windows.strides[axis] - begin
    places = first + np.arange(windows.kernel_shape[axis]) * windows.dilations[axis]
    inside = places < size + end if include_pads else (places >= 0) & (places < size)
    return inside.sum(axis=1)


def _counts_along_at_run_time(dy: Tensor, x: Tensor, windows: Windows, axis: int, include_pads: bool) -> Tensor:
    builder = dy.builder
    index = ir.DataType.INT64
    outputs, size = (
        builder.op("Squeeze", builder.op("Shape", tensor, start=axis + 2, end=axis + 3), builder.integers([0]))
        for tensor in (dy, x)
    )
    windows_along = builder.op("Range", builder.scalar(0, index), outputs, builder.scalar(1, index))
    column = builder.op("Unsqueeze", windows_along, builder.integers([1])) * windows.strides[axis]
    offsets = np.arange(windows.kernel_shape[axis]) * windows.dilations[axis] - windows.pads_begin[axis]
    places = column + builder.integers([int(offset) for offset in offsets])
    if include_pads:
        inside = builder.op("Less", places, size + windows.pads_end[axis])
    else:
        inside = builder.op("And", builder.op("GreaterOrEqual", places, 0), builder.op("Less", places, size))
    return builder.op("ReduceSum", builder.cast(inside, dy.dtype), builder.integers([1]), keepdims=0)


def columns_to_image(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """The gradient of Col2Im: the blocks of the padded dy, cut along one axis after another."""
    columns, builder = op.required(0), op.builder
    axes = op.required(1).dimension(0) or op.required(2).dimension(0)
    if axes is None:
        raise GradientError(
            f"{op}: the length of its image_shape '{op.required(1).name}' is not known, so nor is the number of spatial axes; "
            "make image_shape a constant, or declare its shape"
        )
    strides, dilations = (op.attribute(name, (1,) * axes) for name in ("strides", "dilations"))
    pads = op.attribute("pads", (0,) * 2 * axes)
    cut = dy
    if any(pads):
        cut = builder.op("Pad", cut, builder.integers([0, 0, *pads[:axes], 0, 0, *pads[axes:]]))
    for axis in range(axes):
        size, extent = _number(op, 2, axis), _number(op, 1, axis)
        room = extent + (pads[axis] + pads[axes + axis] - 1) - (size - 1) * dilations[axis]
        count = room // strides[axis] + 1 if isinstance(room, int) else room / strides[axis] + 1
        inside = builder.op("Unsqueeze", range_of(size, builder) * dilations[axis], builder.integers([1]))
        cut = builder.op("Gather", cut, inside + range_of(count, builder) * strides[axis], axis=2 + 2 * axis)
    inside_blocks, blocks = range(2, 2 + 2 * axes, 2), range(3, 2 + 2 * axes, 2)
    return (reshape_as(builder.op("Transpose", cut, perm=[0, 1, *inside_blocks, *blocks]), columns),)


def _number(op: Operation, index: int, axis: int) -> int | Tensor:
    """Return an entry of an input: an int if the input is constant, otherwise an int64 scalar."""
    vector = op.required(index)
    if vector.array is not None:
        return int(vector.array.reshape(-1)[axis])
    return op.builder.op("Gather", vector, op.builder.constant(np.array(axis)), axis=0)


MAX_POOL_GRAD = SemanticOperator("MaxPoolGrad", ("dy", "indices", "x"), ("dx",), like("x"), lowering=lower_max_pool_grad)
AVERAGE_POOL_GRAD = SemanticOperator("AveragePoolGrad", ("dy", "x"), ("dx",), like("x"), lowering=lower_average_pool_grad)

OPERATORS = [
    Operator("MaxPool", gradient=max_pool, axes=axis_rules.image, precision=Precision.FOLLOWS, reopen=reopen_rules.max_pool),
    Operator(
        "AveragePool", gradient=average_pool, axes=axis_rules.image, precision=Precision.WIDENED, reopen=reopen_rules.images
    ),
    Operator("LpPool", since=2, gradient=lp_pool, axes=axis_rules.image, reopen=reopen_rules.images),
    Operator("GlobalLpPool", since=2, gradient=global_lp_pool, axes=axis_rules.image, reopen=reopen_rules.images),
    Operator(
        "GlobalAveragePool",
        gradient=global_average_pool,
        axes=axis_rules.image,
        precision=Precision.WIDENED,
        reopen=reopen_rules.images,
    ),
    Operator(
        "GlobalMaxPool", gradient=global_max_pool, axes=axis_rules.image, precision=Precision.FOLLOWS, reopen=reopen_rules.images
    ),
    Operator("MaxUnpool", gradient=max_unpool, axes=axis_rules.moved_image, reopen=reopen_rules.max_unpool),
    Operator("Col2Im", gradient=columns_to_image, axes=axis_rules.of_another_rank, reopen=reopen_rules.images),
    MAX_POOL_GRAD,
    AVERAGE_POOL_GRAD,
]
