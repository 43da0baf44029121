"""The convolution behind a gradient: its windows, channels and sizes, and what several forms do to its data."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.operators.registry import Operation
from burnish.operators.windows import Windows


class Convolution:
    """The convolution y [N, O, *space] = Conv(x [N, C, *space], w [O, C / group, *k]) that a gradient belongs to.

    Numbers of channels are None where they are symbolic, as in the gradient of a convolution whose channels are images; so are
    the batch and the spatial sizes of ``x`` and ``y``.
    """

    def __init__(self, op: Operation, dy: Tensor, x: Tensor, weight: Tensor):
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
        self.batch = next((size for size in (_dimension(x, 0), _dimension(dy, 0)) if size is not None), None)
        self.sizes, self.out_sizes = spatial_sizes(x, self.rank), spatial_sizes(dy, self.rank)

    @property
    def channels(self) -> tuple[int, int]:
        """The static numbers of output and of input channels of a group."""
        assert self.group_out_channels is not None
        assert self.group_in_channels is not None
        return self.group_out_channels, self.group_in_channels

    @property
    def has_static_channels(self) -> bool:
        return self.out_channels is not None and self.group_in_channels is not None

    @property
    def has_static_sizes(self) -> bool:
        """Whether all but the batch is known."""
        return self.has_static_channels and None not in (*self.sizes, *self.out_sizes)

    @property
    def is_depthwise(self) -> bool:
        return self.group > 1 and self.group_in_channels == 1

    @property
    def taps(self) -> int:
        """How many entries of a channel a window reads."""
        return prod(self.kernel)

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


def known(sizes: Iterable[int | None]) -> list[int]:
    """Sizes of which none is symbolic, as integers."""
    return [size for size in sizes if size is not None]


def spatial_sizes(x: Tensor, rank: int) -> tuple[int | None, ...]:
    return tuple(_dimension(x, axis + 2) for axis in range(rank))


def _dimension(tensor: Tensor, axis: int) -> int | None:
    return None if tensor.shape is None else tensor.dimension(axis)


def without_leftover(b: Builder, x: Tensor, convolution: Convolution) -> tuple[Tensor, list[int]]:
    """``x`` and its end pads without the trailing entries that no window reaches, where the sizes are known."""
    end = list(convolution.end)
    cropped: dict[int, int] = {}
    for axis, size in enumerate(spatial_sizes(x, convolution.rank)):
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


def target_shape(b: Builder, head: list[int], x: Tensor, rank: int, factor: int = 1, tail: list[int] | None = None) -> Tensor:
    """``head``, the spatial sizes of ``x`` with the last one times ``factor``, ``tail``: a target of Reshape."""
    sizes = spatial_sizes(x, rank)
    known = [size for size in sizes if size is not None]
    if len(known) == rank:
        return b.integers([*head, *known[:-1], known[-1] * factor, *(tail or [])])
    space = b.op("Shape", x, start=2)
    if factor > 1:
        space = space * b.integers([1] * (rank - 1) + [factor])
    return b.op("Concat", b.integers(head), space, *([b.integers(tail)] if tail else []), axis=0)
