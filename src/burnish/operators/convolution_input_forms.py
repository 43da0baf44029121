"""Forms of a convolution's input gradient: dx [N, C, *space] from dy [N, O, *space] and w [O, C / group, *k]."""

from __future__ import annotations

from math import prod

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.operators.convolution_forms import Convolution, Form, Work, known

MOST_TAPS_BY_PRODUCT = 64
"""The largest number of taps for which a matrix product reverses a weight faster than ``Slice``."""


def _has_unit_strides(convolution: Convolution) -> bool:
    begin, end = _pads(convolution)
    return all(stride == 1 for stride in convolution.strides) and min(begin + end) >= 0


def _pads(convolution: Convolution) -> tuple[list[int], list[int]]:
    axes = range(convolution.rank)
    return [convolution.reach(axis) - convolution.begin[axis] for axis in axes], [
        convolution.reach(axis) - convolution.end[axis] for axis in axes
    ]


def _reversed_convolution(b: Builder, convolution: Convolution, dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """Stride 1: the convolution of dy with the weight, with channel axes swapped and spatial axes reversed."""
    begin, end = _pads(convolution)
    return b.op(
        "Conv",
        dy,
        _turned_weight(b, w, convolution),
        kernel_shape=list(convolution.kernel),
        dilations=list(convolution.dilations),
        pads=begin + end,
        group=convolution.group,
    )


def _reversed_convolution_work(convolution: Convolution, batch: int) -> Work:
    outputs, inputs = convolution.channels
    products = batch * convolution.group * outputs * inputs * convolution.taps * prod(known(convolution.sizes))
    if convolution.group == 1:
        turned = "turned weights" if convolution.taps > 1 else "moved weights"
        return {"products": products, turned: outputs * inputs * convolution.taps}
    groups = batch * convolution.group
    if convolution.is_depthwise and convolution.kernel == (3, 3) and set(convolution.dilations) == {1}:
        return {"direct products": products, "groups": groups}
    rows = groups * outputs * convolution.taps * prod(known(convolution.sizes)[:-1])
    return {_grouped_products(convolution): products, "column rows": rows, "groups": groups}


def _grouped_products(convolution: Convolution) -> str:
    return "depthwise products" if convolution.is_depthwise else "grouped products"


def _turned_weight(b: Builder, w: Tensor, convolution: Convolution) -> Tensor:
    """[O, C/g, *k] -> [C, O/g, *k], reversed along the spatial axes."""
    rank, group, kernel = convolution.rank, convolution.group, list(convolution.kernel)
    inputs, outputs = (
        -1 if count is None else count for count in (convolution.group_in_channels, convolution.group_out_channels)
    )
    by_product = 1 < convolution.taps <= MOST_TAPS_BY_PRODUCT
    if by_product:
        w = _reversed_by_product(b, w, convolution)
        kernel = [convolution.taps]
    spatial = list(range(2, len(kernel) + 2))
    if group == 1:
        w = b.op("Transpose", w, perm=[1, 0, *spatial])
    elif (inputs, outputs) != (1, 1):
        grouped = b.op("Reshape", w, b.integers([group, outputs, inputs, *kernel]))
        exchanged = b.op("Transpose", grouped, perm=[0, 2, 1, *(axis + 1 for axis in spatial)])
        w = b.op("Reshape", exchanged, b.integers([-1 if inputs < 0 else group * inputs, outputs, *kernel]))
    if by_product:
        return b.op("Reshape", w, b.integers([0, 0, *convolution.kernel])) if rank > 1 else w
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


def _reversed_by_product(b: Builder, w: Tensor, convolution: Convolution) -> Tensor:
    """[O, C/g, *k] -> [O, C/g, K], the taps in reverse order: a product with a permutation matrix, which rounds nothing.

    ONNX Runtime's ``Slice`` copies entry by entry if a step is negative: 10 ms for a weight [512, 512, 3, 3], compared with 2 ms
    for the product.
    """
    if convolution.rank > 1:
        w = b.op("Reshape", w, b.integers([0, 0, convolution.taps]))
    return b.op("MatMul", w, b.constant(np.eye(convolution.taps)[::-1].astype(w.dtype.numpy())))


def _transposed_convolution(b: Builder, convolution: Convolution, dy: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """``ConvTranspose``, which reads the weight unchanged: a product per image, with entries summed over windows."""
    sizes = convolution.sizes
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


def _transposed_convolution_work(convolution: Convolution, batch: int) -> Work:
    outputs, inputs = convolution.channels
    weights = convolution.group * outputs * inputs * convolution.taps
    products = batch * weights * prod(known(convolution.out_sizes))
    if convolution.group > 1:
        return {f"scattered {_grouped_products(convolution)}": products, "scattered groups": batch * convolution.group}
    columns = batch * inputs * convolution.taps * prod(known(convolution.out_sizes))
    scattered = "scattered" if convolution.rank == 2 else "scattered by index"
    return {"products": products, "packed weights": batch * weights, **({scattered: columns} if convolution.taps > 1 else {})}


REVERSED_CONVOLUTION = Form("reversed convolution", _has_unit_strides, _reversed_convolution, _reversed_convolution_work)
TRANSPOSED_CONVOLUTION = Form("transposed convolution", lambda _: True, _transposed_convolution, _transposed_convolution_work)

INPUT_FORMS = (REVERSED_CONVOLUTION, TRANSPOSED_CONVOLUTION)
"""If sizes are unknown, the first form that applies is chosen."""
