"""Ways to compute a convolution and its gradients: oneDNN in several layouts, and products with a matrix of windows.

oneDNN takes either layout, with height and width exchanged or not. Its speed for the same convolution depends on the layout, on
the longer axis and on the number of threads; some cases use its reference code, which is a hundred times slower. All ways compute
the same sums, in another order.

The functions take the fastest way for their sizes on this machine. Operands are images [N, C, H, W] or volumes [N, C, D, H, W] in
any layout; signals [N, C, L] are images of one row. Results have channels last. Gradients of weights have the layout of the
state: channels last for image kernels, C order for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

from burnish.engines.torch.runtime import kernel_choice
from burnish.engines.torch.translate.rules import records_one_call

SLAB = 1 << 19
"""Bytes of windows that are copied at a time, so that they stay in the cache until they are multiplied."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution; one entry for each axis of the images.

    Attributes:
        strides: distances between windows.
        padding: zeros on either side of the images.
        dilations: distances between pixels of a window.
        groups: number of channel groups.
    """

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1

    def exchanged(self) -> Windows:
        """Return the windows with height and width exchanged."""
        return Windows(self.strides[::-1], self.padding[::-1], self.dilations[::-1], self.groups)


class Way(Protocol):
    """A way to compute a convolution and its gradients. All operands have one dtype."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: Windows) -> torch.Tensor:
        """Return y [N, K, *places] for x [N, C, *space], weight [K, C / groups, *extents] and bias [K]."""
        ...

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the gradient of x; only the shape of x is read."""
        ...

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the gradient of the weight; only the shape of the weight is read."""
        ...


@dataclass(frozen=True)
class OneDNN:
    """oneDNN's convolution.

    Attributes:
        channels_last: layout of its operands.
        exchanged: True if height and width are exchanged.
    """

    channels_last: bool
    exchanged: bool = False

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: Windows) -> torch.Tensor:
        windows = self._windows(windows)
        y = torch.ops.aten.convolution.default(
            self._given(x),
            self._given(weight),
            bias,
            windows.strides,
            windows.padding,
            windows.dilations,
            False,
            [0] * len(windows.strides),
            windows.groups,
        )
        return self._returned(y)

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        as_it_is = not self.exchanged and x.dtype == dy.dtype and x.is_contiguous(memory_format=self._format(x))
        like = self._given(x) if as_it_is else self._empty(x, dy.dtype)
        return self._returned(self._backward(self._given(dy), like, self._given(weight), windows, wanted=0))

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, windows: Windows) -> torch.Tensor:
        return self._returned(self._backward(self._given(dy), self._given(x), self._empty(weight, dy.dtype), windows, wanted=1))

    def _backward(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, windows: Windows, wanted: int) -> torch.Tensor:
        windows = self._windows(windows)
        nothing = [0] * len(windows.strides)
        mask = [wanted == 0, wanted == 1, False]
        gradients = torch.ops.aten.convolution_backward.default(
            dy,
            x,
            weight,
            None,
            windows.strides,
            windows.padding,
            windows.dilations,
            False,
            nothing,
            windows.groups,
            mask,
        )
        return gradients[wanted]

    def _windows(self, windows: Windows) -> Windows:
        return windows.exchanged() if self.exchanged else windows

    def _empty(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory in the (exchanged) shape of a tensor."""
        shape = list(like.shape)
        shape = [*shape[:2], *shape[:1:-1]] if self.exchanged else shape
        return self._plain(torch.empty(shape, dtype=dtype, memory_format=self._format(like)))

    def _format(self, tensor: torch.Tensor) -> torch.memory_format:
        return CHANNELS_LAST[tensor.dim()] if self.channels_last else torch.contiguous_format

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.transpose(2, 3) if self.exchanged else tensor
        return self._plain(tensor.contiguous(memory_format=self._format(tensor)))

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view with the strides of its layout even for axes of one element, because PyTorch infers layouts from them."""
        return _plainly_channels_last(tensor) if self.channels_last else tensor.as_strided(tensor.shape, _strides(tensor.shape))

    def _returned(self, result: torch.Tensor) -> torch.Tensor:
        return laid_out(result.transpose(2, 3) if self.exchanged else result)


class Products:
    """Products with the matrix of all windows, a slab at a time; for one group.

    With channels last, a row of a window is contiguous in memory and copied as one run. The gradient of the images is the
    reverse: products are added up at their windows.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: Windows) -> torch.Tensor:
        outputs, _, *extents = weight.shape
        matrix = weight.movedim(1, -1).reshape(outputs, -1).t()
        y = torch.empty([x.shape[0], *places(x.shape, extents, windows), outputs], dtype=x.dtype)
        for image, start, slab in _slabs(x, extents, windows):
            rows = y[image].view(-1, outputs)[start : start + slab.shape[0]]
            if bias is None:
                torch.mm(slab, matrix, out=rows)
            else:
                torch.addmm(bias, slab, matrix, out=rows)
        return y.movedim(-1, 1)

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Only for images: PyTorch cannot add up windows of volumes."""
        outputs, _, *extents = weight.shape
        matrix = weight.reshape(outputs, -1).t()
        (above, left), (down, right) = windows.padding, windows.strides
        height, width = x.shape[2:]
        dx = torch.zeros([*x.shape[:2], height + 2 * above, width + 2 * left], dtype=dy.dtype)
        rows, columns = dy.shape[2:]
        # Whole rows of windows at a time, or as many columns of one row.
        column_bytes = max(matrix.shape[0] * dy.element_size(), 1)
        wide = min(columns, max(1, SLAB // column_bytes))
        tall = max(1, SLAB // (column_bytes * max(columns, 1)))
        for image, row, column in itertools.product(range(dy.shape[0]), range(0, rows, tall), range(0, columns, max(wide, 1))):
            part = dy[image, :, row : row + tall, column : column + wide]
            reach = [
                (count - 1) * stride + (extent - 1) * dilation + 1
                for count, extent, stride, dilation in zip(
                    part.shape[1:], extents, windows.strides, windows.dilations, strict=True
                )
            ]
            products = torch.mm(matrix, part.reshape(outputs, -1))
            sums = functional.fold(products[None], tuple(reach), tuple(extents), windows.dilations, 0, windows.strides)
            dx[image, :, row * down :, column * right :][:, : reach[0], : reach[1]] += sums[0]
        return laid_out(dx[:, :, above : above + height, left : left + width])

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, windows: Windows) -> torch.Tensor:
        outputs, channels, *extents = weight.shape
        sums = torch.zeros([outputs, math.prod(extents) * channels], dtype=dy.dtype)
        flows = dy.movedim(1, -1)
        for image, start, slab in _slabs(x, extents, windows):
            rows = flows[image].reshape(-1, outputs)[start : start + slab.shape[0]]
            sums.addmm_(rows.t(), slab)
        return sums.view(outputs, *extents, channels).movedim(-1, 1)


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return images, volumes or their kernels with channels last."""
    return _plainly_channels_last(tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()]))


def _plainly_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    outer, channels, *space = tensor.shape
    first, *rest, last = _strides([outer, *space, channels])
    return tensor.as_strided(tensor.shape, [first, last, *rest])


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(max(extent, 1) for extent in shape[axis + 1 :]) for axis in range(len(shape))]


def places(x: Sequence[int], extents: Sequence[int], windows: Windows) -> list[int]:
    """Return the number of windows of these extents along each axis of images of this shape [N, C, *space]."""
    return [
        (size + 2 * pad - dilation * (extent - 1) - 1) // stride + 1
        for size, extent, stride, pad, dilation in zip(
            x[2:], extents, windows.strides, windows.padding, windows.dilations, strict=True
        )
    ]


def _slabs(x: torch.Tensor, extents: Sequence[int], windows: Windows) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the matrix [places, *extents * C] of all windows of each image, in parts.

    Returns:
        The image, the first place in it, and the windows from there on.
    """
    amounts = [amount for pad in reversed(windows.padding) for amount in (pad, pad)]
    padded = laid_out(functional.pad(x, amounts)).movedim(1, -1)
    image_step, *steps, _ = padded.stride()
    counts, channels = places(x.shape, extents, windows), x.shape[1]
    row = math.prod(extents) * channels
    # Split along the first axis with steps that fit, or else along the last.
    axis = 0
    while axis < len(counts) - 1 and math.prod(counts[axis + 1 :]) * row * x.element_size() > SLAB:
        axis += 1
    inner = math.prod(counts[axis + 1 :])
    at_once = max(1, SLAB // max(inner * row * x.element_size(), 1))
    between = [step * stride for step, stride in zip(steps, windows.strides, strict=True)]
    within = [step * dilation for step, dilation in zip(steps, windows.dilations, strict=True)]
    for image in range(x.shape[0]):
        for line, outer in enumerate(np.ndindex(*counts[:axis])):
            for start in range(0, counts[axis], at_once):
                taken = min(at_once, counts[axis] - start)
                offset = sum(step * place for step, place in zip(between, (*outer, start), strict=False))
                seen = padded.as_strided(
                    [taken, *counts[axis + 1 :], *extents, channels],
                    [*between[axis:], *within, 1],
                    padded.storage_offset() + image * image_step + offset,
                )
                yield image, (line * counts[axis] + start) * inner, seen.reshape(-1, row)


WAYS: Mapping[str, Way] = {
    "channels_last": OneDNN(channels_last=True),
    "channels_first": OneDNN(channels_last=False),
    "channels_last_exchanged": OneDNN(channels_last=True, exchanged=True),
    "channels_first_exchanged": OneDNN(channels_last=False, exchanged=True),
    "products": Products(),
}
"""The usual way comes first."""

TRIED_PLACES, LARGE = 4096, 8
"""The number of windows in a trial, rounded to whole rows, and the factor by which a convolution must exceed it for a trial."""

MOST_KNOWN = 4096
"""The number of sizes with a cached choice; beyond it, the cache is cleared."""

_known: dict[tuple[object, ...], str] = {}


@records_one_call
def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    measured: bool,
) -> torch.Tensor:
    """Convolve x [N, C, *space] with weight [K, C / groups, *extents], plus bias [K], to y [N, K, *places].

    Args:
        x: signals, images or volumes, float32.
        weight: the kernels.
        bias: values added to each channel of y, or None.
        strides: strides of the windows, for each axis.
        padding: padding of each axis, equal on both sides.
        dilations: dilations of each axis.
        groups: number of channel groups.
        measured: True to choose the way by measurement; otherwise the usual one is used.
    """
    windows = _windows(strides, padding, dilations, groups)
    images, kernels = _lifted(x), _lifted(weight)

    def run(way: Way, images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return way.forward(images, kernels, bias, windows)

    flows = images.new_empty(1).expand(len(images), len(kernels), *places(images.shape, kernels.shape[2:], windows))
    y = _by_choice("forward", run, images, flows, kernels, windows, measured)
    return y.squeeze(2) if x.dim() == 3 else y


@records_one_call
def input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    measured: bool,
) -> torch.Tensor:
    """Return dx [N, C, *space] for dy [N, K, *places] and weight; only the shape of x is read. See ``convolve``."""
    windows = _windows(strides, padding, dilations, groups)
    kernels = _lifted(weight)

    def run(way: Way, images: torch.Tensor, flows: torch.Tensor) -> torch.Tensor:
        return way.input_gradient(flows, kernels, images, windows)

    dx = _by_choice("input", run, _lifted(x), _lifted(dy), kernels, windows, measured)
    return dx.squeeze(2) if x.dim() == 3 else dx


@records_one_call
def weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    measured: bool,
) -> torch.Tensor:
    """Return dw [K, C / groups, *extents] for dy [N, K, *places] and x [N, C, *space]; only the shape of the weight is read."""
    windows = _windows(strides, padding, dilations, groups)
    kernels = _lifted(weight)

    def run(way: Way, images: torch.Tensor, flows: torch.Tensor) -> torch.Tensor:
        return way.weight_gradient(flows, images, kernels, windows)

    dw = _by_choice("weight", run, _lifted(x), _lifted(dy), kernels, windows, measured)
    return dw if x.dim() == 4 else dw.reshape(weight.shape).contiguous()


@records_one_call
def transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    strides: Sequence[int],
    padding: Sequence[int],
    extra: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    measured: bool,
) -> torch.Tensor:
    """Transposed convolution of x [N, C, *places] with weight [C, K / groups, *extents], plus bias [K], to y [N, K, *space].

    It is the input gradient of the convolution from y to x; ``extra`` is the excess of y's size over the smallest one with these
    places. See ``convolve``.
    """
    space = [
        (count - 1) * stride - 2 * pad + dilation * (extent - 1) + 1 + more
        for count, stride, pad, dilation, extent, more in zip(
            x.shape[2:], strides, padding, dilations, weight.shape[2:], extra, strict=True
        )
    ]
    shaped = x.new_empty(1).expand(x.shape[0], weight.shape[1] * groups, *space)
    y = input_gradient(x, weight, shaped, strides, padding, dilations, groups, measured)
    return y if bias is None else y.add_(bias.view(-1, *[1] * len(space)))


Run = Callable[[Way, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of a way, the images and the results (or their gradients); only the shape of one of them may be read."""


def _by_choice(
    operation: str,
    run: Run,
    images: torch.Tensor,
    flows: torch.Tensor,
    kernels: torch.Tensor,
    windows: Windows,
    measured: bool,
) -> torch.Tensor:
    if not measured or images.numel() == 0 or flows.numel() == 0:
        return run(WAYS["channels_last"], images, flows)
    sizes = (operation, images.shape, flows.shape, kernels.shape, windows, images.dtype, torch.get_num_threads())
    name = _known.get(sizes)
    if name is None:
        possible = possible_ways(operation, images.dim(), windows.groups)

        def measure() -> str:
            ways = {name: _bound(run, WAYS[name], images, flows) for name in possible}
            trials = None
            if flows.shape[0] * math.prod(flows.shape[2:]) >= LARGE * TRIED_PLACES:
                trials = {
                    name: _bound(run, WAYS[name], *_part(images, flows, kernels.shape[2:], windows, "exchanged" in name))
                    for name in possible
                }
            return kernel_choice.quickest(ways, trials)

        sources = [Path(__file__)]
        name = kernel_choice.choose(_key(operation, images, kernels, windows), possible, sources, measure)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[sizes] = name
    return run(WAYS[name], images, flows)


def _bound(run: Run, way: Way, images: torch.Tensor, flows: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: run(way, images, flows)


def possible_ways(operation: str, rank: int, groups: int) -> list[str]:
    """Return the possible ways, the usual one first: volumes are not exchanged, and their input gradients are not products."""
    names = [name for name in WAYS if rank == 4 or "exchanged" not in name]
    return [name for name in names if name != "products" or (groups == 1 and (rank == 4 or operation != "input"))]


def _part(
    images: torch.Tensor, flows: torch.Tensor, extents: Sequence[int], windows: Windows, exchanged: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some rows of one image and their results; columns if height and width are exchanged.

    oneDNN chooses its kernel by the length of a row.
    """
    images, flows = images[:1], flows[:1]
    axes = list(range(len(extents)))
    for axis in (axes[::-1] if exchanged else axes)[:-1]:
        others = math.prod(flows.shape[2:]) // flows.shape[axis + 2]
        count = min(flows.shape[axis + 2], max(1, TRIED_PLACES // others))
        reach = windows.dilations[axis] * (extents[axis] - 1) + 1
        size = (count - 1) * windows.strides[axis] + reach - 2 * windows.padding[axis]
        if count < flows.shape[axis + 2] and size > 0:
            images, flows = images.narrow(axis + 2, 0, size), flows.narrow(axis + 2, 0, count)
    return images, flows


def _key(operation: str, images: torch.Tensor, kernels: torch.Tensor, windows: Windows) -> str:
    """Return the cache key of a choice.

    The number of images and their extents are rounded up to powers of two, so that lengths that vary between batches are not
    measured one by one.
    """
    count, channels, *space = images.shape
    sizes = {
        "x": [_rounded_up(count), channels, *map(_rounded_up, space)],
        "w": kernels.shape,
        "s": windows.strides,
        "p": windows.padding,
        "d": windows.dilations,
        "g": [windows.groups],
        "t": [torch.get_num_threads()],
    }
    numbers = (f"{name}{'x'.join(map(str, values))}" for name, values in sizes.items())
    return " ".join(("convolution", operation, str(images.dtype).removeprefix("torch."), *numbers))


def _rounded_up(extent: int) -> int:
    return 1 << (extent - 1).bit_length()


def _windows(strides: Sequence[int], padding: Sequence[int], dilations: Sequence[int], groups: int) -> Windows:
    if len(strides) == 1:
        return Windows((1, *strides), (0, *padding), (1, *dilations), groups)
    return Windows(tuple(strides), tuple(padding), tuple(dilations), groups)


def _lifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
