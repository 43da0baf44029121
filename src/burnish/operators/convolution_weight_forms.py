"""Forms of a convolution's weight gradient: dw [O, C / group, *k] from dy [N, O, *space] and x [N, C, *space].

For a depthwise convolution: dw [C m, 1, *k] from dy [N, C m, *space].
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.operators.convolution_forms import Convolution, Form, Work, known, spatial_sizes, target_shape, without_leftover


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
    """Pointwise: one product over the pixels of all images, with copies of dy and x that join batch and pixels."""
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
    """Return the entries of x that a pointwise convolution reads, without those between strides."""
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
    """[N, ...] -> dw; no sum for a single image."""
    total = products if convolution.batch == 1 else b.op("ReduceSum", products, b.integers([0]), keepdims=0)
    outputs, inputs = convolution.channels
    return b.op("Reshape", total, b.integers([convolution.group * outputs, inputs, *convolution.kernel]))


def _unfolded_product(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each image and group, a product of dy [O/g, P] and the transpose of the unfolded windows of x, [C/g K, P].

    A convolution of each channel with the K kernels that contain a single one unfolds the windows, with their strides, dilations
    and pads.
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
    """One convolution with images as channels, ``dy`` as kernel, and taps and input channels as columns.

    ``x`` is the data [1, g N, *space, C/g] with its last two axes merged, ``dy`` the weight [O, N, *space]; a step of one pixel
    along the merged axis is a step of C/g entries, so dilations and pads of that axis are multiples of C/g. Strides and dilations
    change places. The output [1, O, *k, C/g] is dw with its channels last. No im2col matrix reaches memory, and the inner product
    has k C/g columns, which suits a matrix product.

    A dilation along the last axis needs that axis separate from the channels: the convolution then has one more axis, and
    runtimes support up to three. In three dimensions all entries between the taps are computed and dropped.
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

    Strides and dilations change places. No attribute contains a number of channels.
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
"""If sizes are unknown, the first form that applies is chosen."""


LARGEST_DIAGONALS = 2**18
"""The largest number of entries in the constant factor of joined row products."""


def _row_products(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each tap along the leading axes, the product of dy^T [C, m Wo, rows] and x [C, rows, W].

    Its entry (w, v) belongs to the tap j along the last axis with v = w stride + j dilation - pad; a product with a constant
    0/1 matrix [Wo W, k] sums these diagonals. Rows are all images' rows; m is the number of outputs per input channel.
    """
    channels, multiplier, width = convolution.group, convolution.channels[0], known(convolution.sizes)[-1]
    columns = _columns(b, convolution, dy)
    diagonals = b.constant(_diagonals(convolution).astype(dy.dtype.numpy()))
    sums = []
    for rows in _rows_by_tap(b, convolution, x):
        product = b.op("MatMul", columns, b.op("Reshape", rows, b.integers([channels, -1, width])))
        sums.append(b.op("MatMul", b.op("Reshape", product, b.integers([channels * multiplier, -1])), diagonals))
    joined = b.op("Concat", *sums, axis=1) if len(sums) > 1 else sums[0]
    return b.op("Reshape", joined, b.integers([channels * multiplier, 1, *convolution.kernel]))


def _joined_row_products(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The same with the rows of all leading taps side by side: two products in total; the second adds more zeros."""
    channels, multiplier, width = convolution.group, convolution.channels[0], known(convolution.sizes)[-1]
    leading = prod(convolution.kernel[:-1])
    rows = b.op("Concat", *_rows_by_tap(b, convolution, x), axis=-1)
    rows = b.op("Reshape", rows, b.integers([channels, -1, leading * width]))
    product = b.op("MatMul", _columns(b, convolution, dy), rows)
    single = _diagonals(convolution).reshape(-1, 1, width, 1, convolution.kernel[-1])
    diagonals = single * np.eye(leading, dtype=bool)[:, None, :, None]
    flat = diagonals.reshape(-1, convolution.taps).astype(dy.dtype.numpy())
    total = b.op("MatMul", b.op("Reshape", product, b.integers([channels * multiplier, -1])), b.constant(flat))
    return b.op("Reshape", total, b.integers([channels * multiplier, 1, *convolution.kernel]))


def _columns(b: Builder, convolution: Convolution, dy: Tensor) -> Tensor:
    """dy^T [C, m Wo, rows]."""
    rank, channels, multiplier = convolution.rank, convolution.group, convolution.channels[0]
    extents = known(convolution.out_sizes)
    if multiplier == 1:
        columns = b.op("Transpose", dy, perm=[1, 0, *range(2, rank + 2)])
        return b.op("Transpose", b.op("Reshape", columns, b.integers([channels, -1, extents[-1]])), perm=[0, 2, 1])
    columns = b.op("Reshape", dy, b.integers([0, channels, multiplier, *extents]))
    columns = b.op("Transpose", columns, perm=[1, 2, rank + 2, 0, *range(3, rank + 2)])
    return b.op("Reshape", columns, b.integers([channels, multiplier * extents[-1], -1]))


def _rows_by_tap(b: Builder, convolution: Convolution, x: Tensor) -> Iterator[Tensor]:
    """For each tap along the leading axes, the rows of x that it meets, [C, N, *leading axes of dy, W]."""
    rank, leading = convolution.rank, range(convolution.rank - 1)
    extents = known(convolution.out_sizes)
    rows = b.op("Transpose", x, perm=[1, 0, *range(2, rank + 2)])
    begin, end = convolution.begin[:-1], convolution.end[:-1]
    if any(begin) or any(end):
        rows = b.op("Pad", rows, b.integers([0, 0, *begin, 0, 0, 0, *end, 0]))
    for tap in np.ndindex(*convolution.kernel[:-1]):
        starts = [tap[axis] * convolution.dilations[axis] for axis in leading]
        ends = [starts[axis] + (extents[axis] - 1) * convolution.strides[axis] + 1 for axis in leading]
        axes = b.integers([axis + 2 for axis in leading])
        steps = b.integers(convolution.strides[:-1])
        yield b.op("Slice", rows, b.integers(starts), b.integers(ends), axes, steps) if rank > 1 else rows


def _diagonals(convolution: Convolution) -> np.ndarray:
    """[Wo W, k]: true if an output entry meets an input entry through tap j of the last axis."""
    outputs, width = known(convolution.out_sizes)[-1], known(convolution.sizes)[-1]
    taps = np.arange(convolution.kernel[-1]) * convolution.dilations[-1] - convolution.begin[-1]
    met = np.arange(outputs)[:, None, None] * convolution.strides[-1] + taps
    return (met == np.arange(width)[None, :, None]).reshape(outputs * width, -1)


def _row_products_work(convolution: Convolution, batch: int) -> Work:
    channels, multiplier, leading = convolution.group, convolution.channels[0], prod(convolution.kernel[:-1])
    sizes, extents = known(convolution.sizes), known(convolution.out_sizes)
    rows, matrix = batch * channels * prod(extents[:-1]), channels * multiplier * extents[-1] * sizes[-1] * leading
    return {
        "products": rows * multiplier * extents[-1] * sizes[-1] * leading,
        "moved": batch * channels * (prod(sizes) + 2 * multiplier * prod(extents)),
        "slices": batch * channels * prod(sizes) + rows * sizes[-1] * leading if leading > 1 else 0,
        "diagonals": matrix,
        "matrices": channels * leading,
    }


def _joined_row_products_work(convolution: Convolution, batch: int) -> Work:
    separate = _row_products_work(convolution, batch)
    leading = prod(convolution.kernel[:-1])
    joined = batch * convolution.group * prod(known(convolution.out_sizes)[:-1]) * known(convolution.sizes)[-1] * leading
    return {
        "products": separate["products"],
        "moved": separate["moved"] + joined,
        "slices": separate["slices"],
        "summed diagonals": separate["diagonals"] * convolution.taps,
        "matrices": convolution.group,
    }


def _product_per_tap(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each tap, the dot products of each channel of dy with its entries of x, [N, C], and their sum over images.

    A product of a row with a transposed row reads both once. In ONNX Runtime, multiplying and then summing takes twice as long,
    and a row times a column four times as long.
    """
    rank, channels, extents = convolution.rank, convolution.group, known(convolution.out_sizes)
    if any(convolution.begin) or any(convolution.end):
        x = b.op("Pad", x, b.integers([0, 0, *convolution.begin, 0, 0, *convolution.end]))
    spatial, row = b.integers(range(2, rank + 2)), b.integers([-1, channels, 1, prod(extents)])
    steps = b.integers(convolution.strides)
    columns = b.op("Transpose", b.op("Reshape", dy, row), perm=[0, 1, 3, 2])
    dots = []
    for tap in np.ndindex(*convolution.kernel):
        starts = [tap[axis] * convolution.dilations[axis] for axis in range(rank)]
        ends = [starts[axis] + (extents[axis] - 1) * convolution.strides[axis] + 1 for axis in range(rank)]
        met = b.op("Slice", x, b.integers(starts), b.integers(ends), spatial, steps)
        dots.append(b.op("MatMul", b.op("Reshape", met, row), columns))
    by_tap = b.op("Concat", *dots, axis=2)
    return b.op("Reshape", b.op("ReduceSum", by_tap, b.integers([0]), keepdims=0), b.integers([channels, 1, *convolution.kernel]))


def _product_per_tap_work(convolution: Convolution, batch: int) -> Work:
    read = batch * convolution.group * prod(known(convolution.out_sizes)) * convolution.taps
    slices = "tap slices" if set(convolution.strides) == {1} else "strided tap slices"
    return {"multiplied taps": read, slices: read, "matrices": batch * convolution.group * convolution.taps}


def _joins(convolution: Convolution) -> bool:
    if convolution.rank == 1 or not convolution.has_static_sizes:
        return False
    matrix = known(convolution.out_sizes)[-1] * known(convolution.sizes)[-1] * prod(convolution.kernel[:-1])
    return matrix * convolution.taps <= LARGEST_DIAGONALS


def _has_one_output_per_channel(convolution: Convolution) -> bool:
    return convolution.has_static_sizes and convolution.channels[0] == 1


ROW_PRODUCTS = Form("row products", _has_static_sizes, _row_products, _row_products_work)
JOINED_ROW_PRODUCTS = Form("joined row products", _joins, _joined_row_products, _joined_row_products_work)
PRODUCT_PER_TAP = Form("product per tap", _has_one_output_per_channel, _product_per_tap, _product_per_tap_work)

DEPTHWISE_WEIGHT_FORMS = (ROW_PRODUCTS, JOINED_ROW_PRODUCTS, PRODUCT_PER_TAP)
