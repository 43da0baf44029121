"""Convolution gradients in standard operators.

Every form keeps the batch symbolic and its temporaries at the size of the tensors it reads; which one is taken follows from
attributes and static sizes alone. ``benchmarks/convolution_gradients.py`` measures the alternatives.
"""

from __future__ import annotations

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.ops.registry import Operation


class _Convolution:
    """The convolution that a semantic gradient operator belongs to, with the channels of its weight [O, C / group, *k]."""

    def __init__(self, op: Operation, weight: Tensor):
        self.kernel: tuple[int, ...] = op.attribute("kernel_shape")
        self.strides: tuple[int, ...] = op.attribute("strides")
        self.dilations: tuple[int, ...] = op.attribute("dilations")
        self.rank = len(self.kernel)
        pads: tuple[int, ...] = op.attribute("pads")
        self.begin, self.end = pads[: self.rank], pads[self.rank :]
        self.group: int = op.attribute("group")
        channels = [weight.dimension(axis) for axis in (0, 1)]
        if channels[0] is None or channels[1] is None:
            raise UnsupportedOperatorError(
                f"{op}: the numbers of channels of the weight '{weight.name}' are symbolic: declare the shape of the weight"
            )
        self.out_channels, self.group_in_channels = channels[0], channels[1]
        self.group_out_channels = self.out_channels // self.group

    def reach(self, axis: int) -> int:
        """How far a window extends beyond its first entry."""
        return (self.kernel[axis] - 1) * self.dilations[axis]

    def leftover(self, axis: int, size: int) -> int:
        """How many trailing entries of the padded input no window reaches."""
        return (size + self.begin[axis] + self.end[axis] - self.reach(axis) - 1) % self.strides[axis]

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
    rank, group = convolution.rank, convolution.group
    inputs, outputs, kernel = convolution.group_in_channels, convolution.group_out_channels, list(convolution.kernel)
    spatial = list(range(2, rank + 2))
    if group == 1:
        w = b.op("Transpose", w, perm=[1, 0, *spatial])
    elif inputs > 1 or outputs > 1:
        grouped = b.op("Reshape", w, b.integers([group, outputs, inputs, *kernel]))
        exchanged = b.op("Transpose", grouped, perm=[0, 2, 1, *(axis + 1 for axis in spatial)])
        w = b.op("Reshape", exchanged, b.integers([group * inputs, outputs, *kernel]))
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
    """``ConvWeightGrad(dy, x, w)``."""
    dy, x, w = op.required(0), op.required(1), op.required(2)
    convolution = _Convolution(op, w)
    if convolution.is_pointwise:
        return _pointwise_weight_gradient(op.builder, dy, x, convolution)
    return _correlation_weight_gradient(op.builder, dy, x, convolution)


def _pointwise_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """dw = sum over the batch of dy [O, P] times x^T [P, C], P the pixels; entries of ``x`` between strides take no part."""
    rank, group = convolution.rank, convolution.group
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
    if group == 1:
        dy = b.op("Reshape", dy, b.integers([0, 0, -1]))
        x = b.op("Transpose", b.op("Reshape", x, b.integers([0, 0, -1])), perm=[0, 2, 1])
    else:
        dy = b.op("Reshape", dy, b.integers([0, group, convolution.group_out_channels, -1]))
        x = b.op("Reshape", x, b.integers([0, group, convolution.group_in_channels, -1]))
        x = b.op("Transpose", x, perm=[0, 1, 3, 2])
    summed = b.op("ReduceSum", b.op("MatMul", dy, x), b.integers([0]), keepdims=0)
    return b.op("Reshape", summed, b.integers([convolution.out_channels, convolution.group_in_channels, *convolution.kernel]))


def _correlation_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: _Convolution) -> Tensor:
    """One convolution whose channels are the images, whose kernel is ``dy`` and whose columns are taps and input channels.

    ``x`` goes in as data [1, g N, *space, C/g] with its last two axes merged, ``dy`` as weight [O, N, *space]; a step of one
    pixel along the merged axis is a step of C/g entries, so dilations and pads of that axis are multiples of C/g. The output
    [1, O, *k, C/g] holds dw with its channels last. The runtime's own im2col serves as the only temporary.
    """
    rank, group, channels = convolution.rank, convolution.group, convolution.group_in_channels
    sizes = _spatial_sizes(x, rank)
    end = list(convolution.end)
    cropped: dict[int, int] = {}
    for axis, size in enumerate(sizes):
        unread = 0 if size is None else convolution.leftover(axis, size)
        end[axis] = max(convolution.end[axis] - unread, 0)
        if size is not None and unread > convolution.end[axis]:
            cropped[axis] = size - (unread - convolution.end[axis])
    if cropped:
        axes = [axis + 2 for axis in cropped]
        x = b.op("Slice", x, b.integers([0] * len(axes)), b.integers(list(cropped.values())), b.integers(axes))
    spatial = list(range(2, rank + 2))
    if group == 1:
        data = b.op("Transpose", x, perm=[0, *spatial, 1])
    else:
        data = b.op("Reshape", x, _group_shape(b, x, convolution))
        data = b.op("Transpose", data, perm=[1, 0, *(axis + 1 for axis in spatial), 2])
    data = b.op("Reshape", data, _merged_shape(b, x, convolution))
    weight = b.op("Transpose", dy, perm=[1, 0, *spatial])
    steps = list(convolution.dilations[:-1]) + [1]
    y = b.op(
        "Conv",
        data,
        weight,
        strides=steps,
        dilations=[*convolution.strides[:-1], convolution.strides[-1] * channels],
        pads=[*convolution.begin[:-1], convolution.begin[-1] * channels, *end[:-1], end[-1] * channels],
        group=group,
    )
    taps = list(convolution.kernel)
    ends = [*taps[:-1], (convolution.reach(rank - 1) + 1) * channels]
    surplus = [axis for axis, size in enumerate(sizes) if size is None and convolution.strides[axis] > 1]
    if surplus:
        axes_tensor = b.integers([axis + 2 for axis in surplus])
        y = b.op("Slice", y, b.integers([0] * len(surplus)), b.integers([ends[axis] for axis in surplus]), axes_tensor)
    dilation = convolution.dilations[-1]
    reach = convolution.reach(rank - 1) + 1
    y = b.op("Reshape", y, b.integers([convolution.out_channels, *taps[:-1], reach, channels]))
    if dilation > 1:
        y = b.op("Slice", y, b.integers([0]), b.integers([reach]), b.integers([rank]), b.integers([dilation]))
    if channels == 1:
        return b.op("Reshape", y, b.integers([convolution.out_channels, 1, *taps]))
    return b.op("Transpose", y, perm=[0, rank + 1, *range(1, rank + 1)])


def _group_shape(b: Builder, x: Tensor, convolution: _Convolution) -> Tensor:
    """[N, g, C/g, *space] as a target of Reshape."""
    sizes = _spatial_sizes(x, convolution.rank)
    head = [0, convolution.group, convolution.group_in_channels]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        return b.integers(head + known)
    return b.op("Concat", b.integers(head), b.op("Shape", x, start=2), axis=0)


def _merged_shape(b: Builder, x: Tensor, convolution: _Convolution) -> Tensor:
    """[1, g N, *space, C/g] with its last two axes merged, as a target of Reshape."""
    sizes = _spatial_sizes(x, convolution.rank)
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        return b.integers([1, -1, *known[:-1], known[-1] * convolution.group_in_channels])
    factors = b.integers([1] * (convolution.rank - 1) + [convolution.group_in_channels])
    return b.op("Concat", b.integers([1, -1]), b.op("Shape", x, start=2) * factors, axis=0)
