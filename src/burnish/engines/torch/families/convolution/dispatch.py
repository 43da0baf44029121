"""Convolutions and their gradients by the way that is the quickest for their sizes on this machine.

The functions are called as a graph runs, when the sizes are known. Signals [N, C, L] are images of one row. Results have their
channels last, those of weights lie as state does: kernels of images with the channels last, all others in C order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from burnish.engines.torch.families.convolution import ways as convolution_ways
from burnish.engines.torch.families.convolution.ways import OneDNN, Products, Way, Windows, places
from burnish.engines.torch.runtime import kernel_choice
from burnish.engines.torch.translate.rules import records_one_call

WAYS: Mapping[str, Way] = {
    "channels_last": OneDNN(channels_last=True),
    "channels_first": OneDNN(channels_last=False),
    "channels_last_exchanged": OneDNN(channels_last=True, exchanged=True),
    "channels_first_exchanged": OneDNN(channels_last=False, exchanged=True),
    "products": Products(),
}
"""The usual way first."""

TRIED_PLACES, LARGE = 4096, 8
"""Windows of a trial, of which the rows are whole, and how many times as many there are where one is made."""

MOST_KNOWN = 4096
"""Sizes whose choice is looked up by themselves; with more of them, they are forgotten and looked up again."""

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
    """x [N, C, *space], weight [K, C / groups, *extents] and bias [K] to y [N, K, *places].

    Args:
        x: signals, images or volumes, float32.
        weight: the kernels.
        bias: added to each channel of y, where there is one.
        strides: of the windows, for each axis; ``padding``, the same on both sides, and ``dilations`` too.
        padding: see ``strides``.
        dilations: see ``strides``.
        groups: of channels.
        measured: whether the way is chosen by measuring; else it is the usual one.
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
    """dy [N, K, *places] and weight to dx [N, C, *space]; of x the shape is read. See ``convolve``."""
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
    """dy [N, K, *places] and x [N, C, *space] to dw [K, C / groups, *extents]; of the weight the shape is read."""
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
    """A transposed convolution: x [N, C, *places], weight [C, K / groups, *extents] and bias [K] to y [N, K, *space].

    It is the gradient of the input of the convolution from y to x; ``extra`` is by how much y is larger than the least that has
    these places. See ``convolve``.
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
"""A way, the images and the results (or their gradients), of which the shape may be all that is read."""


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

        sources = [Path(convolution_ways.__file__)]
        name = kernel_choice.choose(_key(operation, images, kernels, windows), possible, sources, measure)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[sizes] = name
    return run(WAYS[name], images, flows)


def _bound(run: Run, way: Way, images: torch.Tensor, flows: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: run(way, images, flows)


def possible_ways(operation: str, rank: int, groups: int) -> list[str]:
    """The ways that there are, the usual one first: volumes are not turned round, nor are their gradients products."""
    names = [name for name in WAYS if rank == 4 or "exchanged" not in name]
    return [name for name in names if name != "products" or (groups == 1 and (rank == 4 or operation != "input"))]


def _part(
    images: torch.Tensor, flows: torch.Tensor, extents: Sequence[int], windows: Windows, exchanged: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of one image, and their results; columns of it where height and width are exchanged.

    Which of its kernels oneDNN takes depends on the length of a row.
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
    """What a choice is remembered by.

    The number of images and their extents are rounded up to powers of two: lengths that change from batch to batch are not
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
    """A signal, or its kernels, as an image of one row."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
