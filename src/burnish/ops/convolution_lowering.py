"""Convolution gradients in standard operators.

Every form keeps the batch symbolic and its temporaries at the size of the tensors it reads; which one is taken follows from
attributes and static sizes alone. ``benchmarks/convolution_gradients.py`` measures the alternatives.
"""

from __future__ import annotations

from math import prod

import numpy as np

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.ops.registry import Operation
from burnish.ops.windows import Windows


class _Convolution:
    """The convolution that a semantic gradient operator belongs to, with the channels of its weight [O, C / group, *k].

    Numbers of channels are None where they are symbolic, as in the gradient of a convolution whose channels are images.
    """

    def __init__(self, op: Operation, weight: Tensor):
        self.windows = Windows.declared(op)
        self.rank = self.windows.rank
        self.kernel, self.strides, self.dilations = self.windows.kernel_shape, self.windows.strides, self.windows.dilations
        self.begin, self.end = self.windows.pads_begin, self.windows.pads_end
        self.group: int = op.attribute("group")
        self.out_channels, self.group_in_channels = (weight.dimension(axis) for axis in (0, 1))
        if self.group > 1 and self.out_channels is None and self.group_in_channels is None:
            raise UnsupportedOperatorError(
                f"{op}: both numbers of channels of the weight '{weight.name}' are symbolic: declare the shape of the weight"
            )
        self.group_out_channels = None if self.out_channels is None else self.out_channels // self.group

    @property
    def channels(self) -> tuple[int, int]:
        """The static numbers of output and of input channels of a group."""
        assert self.group_out_channels is not None
        assert self.group_in_channels is not None
        return self.group_out_channels, self.group_in_channels

    @property
    def has_static_channels(self) -> bool:
        return self.out_channels is not None and self.group_in_channels is not None

    def reach(self, axis: int) -> int:
        """How far a window extends beyond its first entry."""
        return self.windows.span(axis) - 1

    def leftover(self, axis: int, size: int) -> int:
        """How many trailing entries of the padded input no window reaches."""
        return (size + self.begin[axis] + self.end[axis] - self.windows.span(axis)) % self.strides[axis]

    @property
    def is_pointwise(self) -> bool:
        """Whether every output reads one input entry and there is no padding."""
        return all(size == 1 for size in self.kernel) and not any(self.begin) and not any(self.end)


def _spatial_sizes(x: Tensor, rank: int) -> tuple[int | None, ...]:
    return (None,) * rank if x.shape is None else tuple(x.dimension(axis + 2) for axis in range(rank))


def lower_input_gradient(op: Operation) -> Tensor:
    """``ConvInputGrad(dy, w, x)``.

    Stride 1: the convolution of ``dy`` with the weight whose two channel axes are exchanged and whose spatial axes are
    reversed. Otherwise ConvTranspose.
    """
    dy, w, x = op.required(0), op.required(1), op.required(2)
    convolution = _Convolution(op, w)
    begin = [convolution.reach(axis) - convolution.begin[axis] for axis in range(convolution.rank)]
    end = [convolution.reach(axis) - convolution.end[axis] for axis in range(convolution.rank)]
    if all(stride == 1 for stride in convolution.strides) and min(begin + end) >= 0:
        return op.builder.op(
            "Conv",
            dy,
            _transposed_weight(op.builder, w, convolution),
            kernel_shape=list(convolution.kernel),
            dilations=list(convolution.dilations),
            pads=begin + end,
            group=convolution.group,
        )
    return _transposed_convolution(op.builder, dy, w, x, convolution)


def _transposed_weight(b: Builder, w: Tensor, convolution: _Convolution) -> Tensor:
    """[O, C/g, *k] -> [C, O/g, *k], reversed along the spatial axes."""
    rank, group, kernel = convolution.rank, convolution.group, list(convolution.kernel)
    inputs, outputs = (
        -1 if count is None else count for count in (convolution.group_in_channels, convolution.group_out_channels)
    )
    spatial = list(range(2, rank + 2))
    if group == 1:
        w = b.op("Transpose", w, perm=[1, 0, *spatial])
    elif (inputs, outputs) != (1, 1):
        grouped = b.op("Reshape", w, b.integers([group, outputs, inputs, *kernel]))
        exchanged = b.op("Transpose", grouped, perm=[0, 2, 1, *(axis + 1 for axis in spatial)])
        w = b.op("Reshape", exchanged, b.integers([-1 if inputs < 0 else group * inputs, outputs, *kernel]))
    reversed_axes = [axis for axis in range(rank) if kernel[axis] > 1]
    if reversed_axes:
        count = len(reversed_axes)
        w = b.op(
            "Slice",
            w,
            b.integers([-1] * count),
            b.integers([-(2**31)] * count),
            b.integers([axis + 2 for axis in reversed_axes]),
            b.integers([-1] * count),
        )
    return w


def _transposed_convolution(b: Builder, dy: Tensor, w: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    rank = convolution.rank
    sizes = _spatial_sizes(x, rank)
    padding = [
        convolution.strides[axis] - 1 if size is None else convolution.leftover(axis, size) for axis, size in enumerate(sizes)
    ]
    dx = b.op(
        "ConvTranspose",
        dy,
        w,
        kernel_shape=list(convolution.kernel),
        strides=list(convolution.strides),
        dilations=list(convolution.dilations),
        pads=[*convolution.begin, *convolution.end],
        output_padding=padding,
        group=convolution.group,
    )
    surplus = [axis for axis, size in enumerate(sizes) if size is None and convolution.strides[axis] > 1]
    if surplus:
        axes = b.integers([axis + 2 for axis in surplus])
        ends = b.op("Gather", b.op("Shape", x), axes, axis=0)
        dx = b.op("Slice", dx, b.integers([0] * len(surplus)), ends, axes)
    return dx


def lower_weight_gradient(op: Operation) -> Tensor:
    """``ConvWeightGrad(dy, x, w)``: one of four forms, chosen by attributes and static sizes.

    - A symbolic number of channels: one convolution whose channels are the images, and whose images are the channels.
    - A pointwise kernel: matrix products over the pixels.
    - One input channel per group (depthwise) on a plane of moderate width: products of rows, of which diagonals are read.
    - Everything else: one convolution whose channels are the images.
    """
    dy, x, w = op.required(0), op.required(1), op.required(2)
    convolution = _Convolution(op, w)
    if not convolution.has_static_channels:
        return _exchanged_weight_gradient(op.builder, dy, x, convolution)
    if convolution.is_pointwise:
        return _pointwise_weight_gradient(op.builder, dy, x, convolution)
    if _favors_row_products(dy, x, convolution):
        return _row_product_weight_gradient(op.builder, dy, x, convolution)
    return _correlation_weight_gradient(op.builder, dy, x, convolution)


def _pointwise_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """dw = sum over the batch of dy [O, P] times x^T [P, C], P the pixels; entries of ``x`` between strides take no part.

    Either one product per image and a sum over the batch (temporary N O C), or, where that is more than copies of ``dy`` and
    ``x`` with the batch moved beside the pixels (N P (O + C)), those copies and one product over N P.
    """
    rank, group = convolution.rank, convolution.group
    outputs, inputs = convolution.channels
    strided = [axis for axis in range(rank) if convolution.strides[axis] > 1]
    if strided:
        count = len(strided)
        x = b.op(
            "Slice",
            x,
            b.integers([0] * count),
            b.integers([2**31 - 1] * count),
            b.integers([axis + 2 for axis in strided]),
            b.integers([convolution.strides[axis] for axis in strided]),
        )
    sizes = [size for size in _spatial_sizes(dy, rank) if size is not None]
    if group == 1 and len(sizes) == rank and outputs * inputs > prod(sizes) * (outputs + inputs):
        rows = b.op("Transpose", b.op("Reshape", dy, b.integers([0, 0, -1])), perm=[1, 0, 2])
        columns = b.op("Transpose", b.op("Reshape", x, b.integers([0, 0, -1])), perm=[0, 2, 1])
        product = b.op(
            "MatMul",
            b.op("Reshape", rows, b.integers([outputs, -1])),
            b.op("Reshape", columns, b.integers([-1, inputs])),
        )
    else:
        groups = [] if group == 1 else [group]
        rows = b.op("Reshape", dy, b.integers([0, *groups, outputs, -1]))
        columns = b.op("Reshape", x, b.integers([0, *groups, inputs, -1]))
        columns = b.op("Transpose", columns, perm=[0, 2, 1] if group == 1 else [0, 1, 3, 2])
        product = b.op("ReduceSum", b.op("MatMul", rows, columns), b.integers([0]), keepdims=0)
    return b.op("Reshape", product, b.integers([group * outputs, inputs, *convolution.kernel]))


def _favors_row_products(dy: Tensor, x: Tensor, convolution: _Convolution) -> bool:
    """Whether products of rows beat a grouped convolution with one input channel per group.

    They multiply each row entry with the whole width of ``x`` and use ``kernel`` of these products, at about forty times the
    speed of such a convolution. Their products [C, Wo, W] must stay small beside ``x``, with its rows times W.
    """
    rank = convolution.rank
    sizes = [size for size in _spatial_sizes(x, rank) if size is not None]
    widths = dy.dimension(rank + 1)
    multiplier, inputs = convolution.channels
    if convolution.group == 1 or inputs > 1 or len(sizes) < rank or widths is None:
        return False
    return sizes[-1] <= 40 * convolution.kernel[-1] and widths * multiplier <= 4 * prod(sizes[:-1])


def _row_product_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """Depthwise: for each tap along the leading axes, the product of dy^T [C, m Wo, rows] and x [C, rows, W].

    Its entry (w, v) belongs to the tap j along the last axis with v = w stride + j dilation - pad; a product with a constant
    0/1 matrix [Wo W, k] sums these diagonals. Rows are all images' rows; m is the number of outputs per input channel.
    """
    rank, channels, multiplier = convolution.rank, convolution.group, convolution.channels[0]
    taps = convolution.kernel
    leading = range(rank - 1)
    width = x.dimension(rank + 1)
    outputs = [dy.dimension(axis + 2) for axis in range(rank)]
    assert width is not None
    extents = [size for size in outputs if size is not None]
    spatial = list(range(2, rank + 2))
    rows = b.op("Transpose", x, perm=[1, 0, *spatial])
    if any(convolution.begin[:-1]) or any(convolution.end[:-1]):
        begin, end = convolution.begin[:-1], convolution.end[:-1]
        rows = b.op("Pad", rows, b.integers([0, 0, *begin, 0, 0, 0, *end, 0]))
    if multiplier == 1:
        columns = b.op("Transpose", dy, perm=[1, 0, *spatial])
        columns = b.op("Transpose", b.op("Reshape", columns, b.integers([channels, -1, extents[-1]])), perm=[0, 2, 1])
    else:
        columns = b.op("Reshape", dy, b.integers([0, channels, multiplier, *extents]))
        columns = b.op("Transpose", columns, perm=[1, 2, rank + 2, 0, *range(3, rank + 2)])
        columns = b.op("Reshape", columns, b.integers([channels, multiplier * extents[-1], -1]))
    diagonals = b.constant(_diagonals(extents[-1], width, convolution).astype(dy.dtype.numpy()))
    sums = []
    for tap in np.ndindex(*taps[:-1]):
        starts = [tap[axis] * convolution.dilations[axis] for axis in leading]
        ends = [starts[axis] + (extents[axis] - 1) * convolution.strides[axis] + 1 for axis in leading]
        axes = b.integers([axis + 2 for axis in leading])
        steps = b.integers(convolution.strides[:-1])
        taken = b.op("Slice", rows, b.integers(starts), b.integers(ends), axes, steps) if rank > 1 else rows
        product = b.op("MatMul", columns, b.op("Reshape", taken, b.integers([channels, -1, width])))
        sums.append(b.op("MatMul", b.op("Reshape", product, b.integers([channels * multiplier, -1])), diagonals))
    joined = b.op("Concat", *sums, axis=1) if len(sums) > 1 else sums[0]
    return b.op("Reshape", joined, b.integers([channels * multiplier, 1, *taps]))


def _diagonals(outputs: int, width: int, convolution: _Convolution) -> np.ndarray:
    """[outputs * width, k]: 1 where an output entry meets an input entry through tap j of the last axis."""
    taps = np.arange(convolution.kernel[-1]) * convolution.dilations[-1] - convolution.begin[-1]
    met = np.arange(outputs)[:, None, None] * convolution.strides[-1] + taps
    return (met == np.arange(width)[None, :, None]).reshape(outputs * width, -1)


def _correlation_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """One convolution whose channels are the images, whose kernel is ``dy`` and whose columns are taps and input channels.

    ``x`` goes in as data [1, g N, *space, C/g] with its last two axes merged, ``dy`` as weight [O, N, *space]; a step of one
    pixel along the merged axis is a step of C/g entries, so dilations and pads of that axis are multiples of C/g. Strides and
    dilations change places. The output [1, O, *k, C/g] is dw with its channels last. No im2col matrix reaches memory, and
    the inner product has the k C/g columns that a matrix product wants.

    A dilation along the last axis needs that axis apart from the channels: the convolution then has one axis more, which
    runtimes have up to three axes. In three dimensions all entries between the taps are computed and dropped.
    """
    rank, group = convolution.rank, convolution.group
    outputs, channels = convolution.channels
    merged = convolution.dilations[-1] == 1 or rank == 3
    sizes = _spatial_sizes(x, rank)
    x, end = _without_leftover(b, x, convolution)
    spatial = list(range(2, rank + 2))
    if group == 1:
        data = b.op("Transpose", x, perm=[0, *spatial, 1])
    else:
        grouped = b.op("Reshape", x, _target_shape(b, [0, group, channels], x, rank))
        data = b.op("Transpose", grouped, perm=[1, 0, *(axis + 1 for axis in spatial), 2])
    weight = b.op("Transpose", dy, perm=[1, 0, *spatial])
    steps, gaps, begin = list(convolution.dilations), list(convolution.strides), list(convolution.begin)
    extents = list(convolution.kernel)
    if merged:
        data = b.op("Reshape", data, _target_shape(b, [1, -1], x, rank, factor=channels))
        steps[-1], gaps[-1], begin[-1], end[-1] = 1, gaps[-1] * channels, begin[-1] * channels, end[-1] * channels
        extents[-1] = (convolution.reach(rank - 1) + 1) * channels
    else:
        data = b.op("Reshape", data, _target_shape(b, [1, -1], x, rank, tail=[channels]))
        weight = b.op("Unsqueeze", weight, b.integers([rank + 2]))
        steps, gaps, begin, end = [*steps, 1], [*gaps, 1], [*begin, 0], [*end, 0]
    dw = b.op("Conv", data, weight, strides=steps, dilations=gaps, pads=[*begin, *end], group=group)
    surplus = [axis for axis, size in enumerate(sizes) if size is None and convolution.strides[axis] > 1]
    if surplus:
        axes = b.integers([axis + 2 for axis in surplus])
        dw = b.op("Slice", dw, b.integers([0] * len(surplus)), b.integers([extents[axis] for axis in surplus]), axes)
    if merged:
        extents[-1] //= channels
    dw = b.op("Reshape", dw, b.integers([group * outputs, *extents, channels]))
    if extents[-1] > convolution.kernel[-1]:
        step = b.integers([convolution.dilations[-1]])
        dw = b.op("Slice", dw, b.integers([0]), b.integers([extents[-1]]), b.integers([rank]), step)
    if channels == 1:
        return b.op("Reshape", dw, b.integers([group * outputs, 1, *convolution.kernel]))
    return b.op("Transpose", dw, perm=[0, rank + 1, *range(1, rank + 1)])


def _exchanged_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """One convolution of ``x`` as [C/g, g N, *space] with the weight ``dy`` as [O, N, *space], which gives dw as [C/g, O, *k].

    Strides and dilations change places. No attribute holds a number of channels.
    """
    rank, group = convolution.rank, convolution.group
    sizes = _spatial_sizes(x, rank)
    x, end = _without_leftover(b, x, convolution)
    spatial = list(range(2, rank + 2))
    if group == 1:
        data = b.op("Transpose", x, perm=[1, 0, *spatial])
    else:
        inputs = -1 if convolution.group_in_channels is None else convolution.group_in_channels
        grouped = b.op("Reshape", x, _target_shape(b, [0, group, inputs], x, rank))
        grouped = b.op("Transpose", grouped, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
        data = b.op("Reshape", grouped, _target_shape(b, [0, -1], x, rank))
    dw = b.op(
        "Conv",
        data,
        b.op("Transpose", dy, perm=[1, 0, *spatial]),
        strides=list(convolution.dilations),
        dilations=list(convolution.strides),
        pads=[*convolution.begin, *end],
        group=group,
    )
    surplus = [axis for axis, size in enumerate(sizes) if size is None and convolution.strides[axis] > 1]
    if surplus:
        axes = b.integers([axis + 2 for axis in surplus])
        kernel = b.integers([convolution.kernel[axis] for axis in surplus])
        dw = b.op("Slice", dw, b.integers([0] * len(surplus)), kernel, axes)
    return b.op("Transpose", dw, perm=[1, 0, *spatial])


def _without_leftover(b: Builder, x: Tensor, convolution: _Convolution) -> tuple[Tensor, list[int]]:
    """``x`` and its end pads without the trailing entries that no window reaches, where the sizes are known."""
    end = list(convolution.end)
    cropped: dict[int, int] = {}
    for axis, size in enumerate(_spatial_sizes(x, convolution.rank)):
        if size is None:
            continue
        unread = convolution.leftover(axis, size)
        end[axis] = max(convolution.end[axis] - unread, 0)
        if unread > convolution.end[axis]:
            cropped[axis + 2] = size - (unread - convolution.end[axis])
    if cropped:
        axes = b.integers(list(cropped))
        x = b.op("Slice", x, b.integers([0] * len(cropped)), b.integers(list(cropped.values())), axes)
    return x, end


def _target_shape(b: Builder, head: list[int], x: Tensor, rank: int, factor: int = 1, tail: list[int] | None = None) -> Tensor:
    """``head``, the spatial sizes of ``x`` with the last one times ``factor``, ``tail``: a target of Reshape."""
    sizes = _spatial_sizes(x, rank)
    known = [size for size in sizes if size is not None]
    if len(known) == rank:
        return b.integers([*head, *known[:-1], known[-1] * factor, *(tail or [])])
    space = b.op("Shape", x, start=2)
    if factor > 1:
        space = space * b.integers([1] * (rank - 1) + [factor])
    return b.op("Concat", b.integers(head), space, *([b.integers(tail)] if tail else []), axis=0)
