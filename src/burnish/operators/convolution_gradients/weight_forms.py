"""Forms of the gradient of a convolution's weight, each dw [O, C / group, *k] from dy [N, O, *space] and x [N, C, *space]."""

from __future__ import annotations

from math import prod

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.operators.convolution_gradients.form import Form, Work
from burnish.operators.convolution_gradients.geometry import Convolution, known, spatial_sizes, target_shape, without_leftover


def _product_per_image(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Pointwise: the sum over the batch of dy [O, P] times x^T [P, C], P the pixels; a temporary [N, O, C]."""
    outputs, inputs = convolution.channels
    groups = [] if convolution.group == 1 else [convolution.group]
    rows = b.op("Reshape", dy, b.integers([0, *groups, outputs, -1]))
    columns = b.op("Reshape", _read_entries(b, convolution, x), b.integers([0, *groups, inputs, -1]))
    columns = b.op("Transpose", columns, perm=[0, 1, 3, 2] if groups else [0, 2, 1])
    return _summed_over_images(b, convolution, b.op("MatMul", rows, columns))


def _product_per_image_work(convolution: Convolution, batch: int) -> Work:
    weights = convolution.group * prod(convolution.channels)
    return {"products": batch * weights * prod(known(convolution.out_sizes)), "sums": batch * weights}


def _product_over_images(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Pointwise: one product over the pixels of all images, of copies of dy and x with the batch beside the pixels."""
    outputs, inputs = convolution.channels
    rows = b.op("Transpose", b.op("Reshape", dy, b.integers([0, 0, -1])), perm=[1, 0, 2])
    columns = b.op("Reshape", _read_entries(b, convolution, x), b.integers([0, 0, -1]))
    columns = b.op("Reshape", b.op("Transpose", columns, perm=[0, 2, 1]), b.integers([-1, inputs]))
    product = b.op("MatMul", b.op("Reshape", rows, b.integers([outputs, -1])), columns)
    return b.op("Reshape", product, b.integers([outputs, inputs, *convolution.kernel]))


def _product_over_images_work(convolution: Convolution, batch: int) -> Work:
    outputs, inputs = convolution.channels
    pixels = batch * prod(known(convolution.out_sizes))
    return {"products": pixels * outputs * inputs, "moved": pixels * (outputs + inputs)}


def _read_entries(b: Builder, convolution: Convolution, x: Tensor) -> Tensor:
    """What a pointwise convolution reads of x: entries between strides take no part."""
    strided = [axis for axis in range(convolution.rank) if convolution.strides[axis] > 1]
    if not strided:
        return x
    return b.op(
        "Slice",
        x,
        b.integers([0] * len(strided)),
        b.integers([2**31 - 1] * len(strided)),
        b.integers([axis + 2 for axis in strided]),
        b.integers([convolution.strides[axis] for axis in strided]),
    )


def _summed_over_images(b: Builder, convolution: Convolution, products: Tensor) -> Tensor:
    """[N, ...] -> dw; of one image there is nothing to sum."""
    total = products if convolution.batch == 1 else b.op("ReduceSum", products, b.integers([0]), keepdims=0)
    outputs, inputs = convolution.channels
    return b.op("Reshape", total, b.integers([convolution.group * outputs, inputs, *convolution.kernel]))


def _unfolded_product(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each image and group a product of dy [O/g, P] and what the windows of x read, [C/g K, P], its transpose.

    A convolution of each channel by itself with the K kernels that hold a single one lays the windows out, with their strides,
    dilations and pads.
    """
    group, (outputs, inputs), pixels = convolution.group, convolution.channels, prod(known(convolution.out_sizes))
    single = np.eye(convolution.taps).reshape(convolution.taps, 1, *convolution.kernel).astype(dy.dtype.numpy())
    windows = b.op(
        "Conv",
        b.op("Reshape", x, b.integers([-1, 1, *known(convolution.sizes)])),
        b.constant(single),
        kernel_shape=list(convolution.kernel),
        strides=list(convolution.strides),
        dilations=list(convolution.dilations),
        pads=[*convolution.begin, *convolution.end],
    )
    columns = b.op("Reshape", windows, b.integers([-1, group, inputs * convolution.taps, pixels]))
    if outputs == 1:
        product = b.op("MatMul", columns, b.op("Reshape", dy, b.integers([-1, group, pixels, 1])))
    else:
        rows = b.op("Reshape", dy, b.integers([-1, group, outputs, pixels]))
        product = b.op("MatMul", rows, b.op("Transpose", columns, perm=[0, 1, 3, 2]))
    return _summed_over_images(b, convolution, product)


def _unfolded_product_work(convolution: Convolution, batch: int) -> Work:
    outputs, inputs = convolution.channels
    pixels = batch * convolution.group * inputs * convolution.taps * prod(known(convolution.out_sizes))
    products = "products" if outputs > 1 else "dot products"
    sums = batch * convolution.group * outputs * inputs * convolution.taps
    return {"unfolded": pixels, products: pixels * outputs, "sums": sums}


def _correlation(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
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
    sizes = spatial_sizes(x, rank)
    x, end = without_leftover(b, x, convolution)
    spatial = list(range(2, rank + 2))
    if group == 1:
        data = b.op("Transpose", x, perm=[0, *spatial, 1])
    else:
        grouped = b.op("Reshape", x, target_shape(b, [0, group, channels], x, rank))
        data = b.op("Transpose", grouped, perm=[1, 0, *(axis + 1 for axis in spatial), 2])
    weight = b.op("Transpose", dy, perm=[1, 0, *spatial])
    steps, gaps, begin = list(convolution.dilations), list(convolution.strides), list(convolution.begin)
    extents = list(convolution.kernel)
    if merged:
        data = b.op("Reshape", data, target_shape(b, [1, -1], x, rank, factor=channels))
        steps[-1], gaps[-1], begin[-1], end[-1] = 1, gaps[-1] * channels, begin[-1] * channels, end[-1] * channels
        extents[-1] = (convolution.reach(rank - 1) + 1) * channels
    else:
        data = b.op("Reshape", data, target_shape(b, [1, -1], x, rank, tail=[channels]))
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


def _correlation_work(convolution: Convolution, batch: int) -> Work:
    outputs, inputs = convolution.channels
    columns = batch * convolution.group * inputs * convolution.taps * prod(known(convolution.out_sizes))
    if convolution.group == 1:
        return {"products": columns * outputs}
    rows = columns // (inputs * convolution.kernel[-1])
    return {"grouped columns": columns, "column rows": rows, "grouped products": columns * outputs}


def exchanged_weight_gradient(b: Builder, dy: Tensor, x: Tensor, convolution: Convolution) -> Tensor:
    """One convolution of ``x`` as [C/g, g N, *space] with the weight ``dy`` as [O, N, *space], which gives dw as [C/g, O, *k].

    Strides and dilations change places. No attribute holds a number of channels.
    """
    rank, group = convolution.rank, convolution.group
    sizes = spatial_sizes(x, rank)
    x, end = without_leftover(b, x, convolution)
    spatial = list(range(2, rank + 2))
    if group == 1:
        data = b.op("Transpose", x, perm=[1, 0, *spatial])
    else:
        inputs = -1 if convolution.group_in_channels is None else convolution.group_in_channels
        grouped = b.op("Reshape", x, target_shape(b, [0, group, inputs], x, rank))
        grouped = b.op("Transpose", grouped, perm=[2, 1, 0, *(axis + 1 for axis in spatial)])
        data = b.op("Reshape", grouped, target_shape(b, [0, -1], x, rank))
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


def _has_static_sizes(convolution: Convolution) -> bool:
    return convolution.has_static_sizes


PRODUCT_PER_IMAGE = Form("product per image", lambda _: True, _product_per_image, _product_per_image_work)
PRODUCT_OVER_IMAGES = Form(
    "product over images", lambda convolution: convolution.group == 1, _product_over_images, _product_over_images_work
)
CORRELATION = Form("correlation", lambda _: True, _correlation, _correlation_work)
UNFOLDED_PRODUCT = Form("unfolded product", _has_static_sizes, _unfolded_product, _unfolded_product_work)

POINTWISE_WEIGHT_FORMS = (PRODUCT_PER_IMAGE, PRODUCT_OVER_IMAGES)
WEIGHT_FORMS = (CORRELATION, UNFOLDED_PRODUCT)
"""Where sizes are not known, the first that applies is taken."""
