"""Forms of the gradient of a depthwise convolution's weight, dw [C m, 1, *k] from dy [N, C m, *space] and x [N, C, *space]."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.operators.convolution_gradients.form import Form, Work
from burnish.operators.convolution_gradients.geometry import Convolution, known

LARGEST_DIAGONALS = 2**18
"""The most entries of the constant that joined row products are multiplied with."""


def _row_products(b: Builder, convolution: Convolution, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """For each tap along the leading axes the product of dy^T [C, m Wo, rows] and x [C, rows, W].

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
    """The same with the rows of all leading taps side by side: two products in all, of which the second adds more zeros."""
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
    """For each tap along the leading axes the rows of x that it meets, [C, N, *leading axes of dy, W]."""
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
    """[Wo W, k]: true where an output entry meets an input entry through tap j of the last axis."""
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
    """For each tap the dot products of each channel of dy with the entries of x that it meets, [N, C], and their sum over images.

    A product of a row with a transposed row reads both once. ONNX Runtime multiplies and sums in twice the time, and takes four
    times as long for a row with a column.
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


def _has_static_sizes(convolution: Convolution) -> bool:
    return convolution.has_static_sizes


def _has_one_output_per_channel(convolution: Convolution) -> bool:
    return convolution.has_static_sizes and convolution.channels[0] == 1


ROW_PRODUCTS = Form("row products", _has_static_sizes, _row_products, _row_products_work)
JOINED_ROW_PRODUCTS = Form("joined row products", _joins, _joined_row_products, _joined_row_products_work)
PRODUCT_PER_TAP = Form("product per tap", _has_one_output_per_channel, _product_per_tap, _product_per_tap_work)

DEPTHWISE_WEIGHT_FORMS = (ROW_PRODUCTS, JOINED_ROW_PRODUCTS, PRODUCT_PER_TAP)
