"""Replace depthwise convolutions of large kernels over small images by one matrix product per channel.

ONNX Runtime (1.32) has no kernel for depthwise convolutions with computed weights: per channel and image it copies all windows
and multiplies them with the k x k taps. Here the k rows of x for a row of y are concatenated, [k W], and multiplied with a matrix
[k W, Wo] that holds the taps on its diagonals. That takes W / k times as many multiplications, but much faster ones, and copies
only W / Wo entries per entry of a window row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from statistics import fmean

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, replace_node, static_shape
from burnish.operators.convolution_forms import BATCHES

TAP, TAPPED_ROW, IMAGE = 0.15, 4.8, 60.0
"""Time of a convolution in ns: per tap of an output, per row of y and tap, and per channel of an image."""
PRODUCT, COPIED_ROW, COPIED, MOVED, PLACED_TAP, MATRIX = 0.023, 5.6, 0.5, 1.5, 0.35, 200.0
"""Time of the products in ns: per multiplication, per copied row of x, per copied entry, per entry of x (whose first axes are
exchanged, like those of y), per entry of the matrices, and per channel.

Fitted to kernels of 3, 5 and 7 over images of 7 to 56 at batch 1 and 4 (float32, AVX2, one thread).
"""
LEAST_GAIN = 1.15
"""Least speedup for a replacement, about the error of the fit."""


def multiply_depthwise_rows(model: ir.Model) -> bool:
    """Replace depthwise convolutions by faster products, in place, in the main graph only.

    They must have float32 operands, two spatial axes of static sizes, one output per channel, and no strides or dilations. The
    sums have the same terms plus zeros, rounded in another order. A value that is not finite affects its whole row.
    """
    changed = False
    for node in list(model.graph):
        rows = _faster_rows_of(node)
        if rows is not None:
            replace_node(node, _product(Builder(model.graph, before=node), node, rows))
            changed = True
    return changed


def has_depthwise_rows(graph: ir.Graph) -> bool:
    """True if ``multiply_depthwise_rows`` would replace a node."""
    return any(_faster_rows_of(node) is not None for node in graph)


@dataclass(frozen=True)
class _Rows:
    """A convolution of C channels [N, C, H, W] with kernels [C, 1, kh, kw].

    Attributes:
        batch: N, None if symbolic.
        channels: C.
        sizes: H and W.
        kernel: kh and kw.
        begin: zero rows and columns before the image.
        end: zero rows and columns after it.
    """

    batch: int | None
    channels: int
    sizes: tuple[int, int]
    kernel: tuple[int, int]
    begin: tuple[int, int]
    end: tuple[int, int]

    @property
    def out_sizes(self) -> tuple[int, int]:
        height, width = (
            size + begin + end - taps + 1
            for size, begin, end, taps in zip(self.sizes, self.begin, self.end, self.kernel, strict=True)
        )
        return height, width

    @property
    def gain(self) -> float:
        """Speedup by products; for a symbolic batch the geometric mean over ``BATCHES``."""
        batches = BATCHES if self.batch is None else (max(self.batch, 1),)
        return exp(fmean(log(self._convolved(batch) / self._multiplied(batch)) for batch in batches))

    def _convolved(self, batch: int) -> float:
        height, width = self.out_sizes
        rows = self.kernel[0] * self.kernel[1] * height
        return batch * self.channels * (IMAGE + rows * (TAPPED_ROW + width * TAP))

    def _multiplied(self, batch: int) -> float:
        rows, read = self.out_sizes[0] * self.kernel[0], self.sizes[1]
        matrix = self.kernel[0] * read * self.out_sizes[1]
        copied = rows * (COPIED_ROW + read * COPIED) + self.sizes[0] * read * MOVED
        return self.channels * (MATRIX + matrix * PLACED_TAP + batch * (copied + self.out_sizes[0] * matrix * PRODUCT))


def _faster_rows_of(node: ir.Node) -> _Rows | None:
    rows = _rows_of(node)
    return rows if rows is not None and rows.gain >= LEAST_GAIN else None


def _rows_of(node: ir.Node) -> _Rows | None:
    """Return the convolution of a node, or None if the pass does not support it. Constant weights have an ONNX Runtime kernel."""
    if node.op_type != "Conv" or node.domain != "" or attribute_value(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    x, weight = node.inputs[:2]
    taps = None if weight is None or weight.is_initializer() else static_shape(weight)
    if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) != 4 or taps is None:
        return None
    batch, *image = x.shape.dims
    channels = taps[0]
    plain = all(set(attribute_value(node, name, (1,))) == {1} for name in ("strides", "dilations"))
    if not plain or taps[1] != 1 or attribute_value(node, "group", 1) != channels or image[0] != channels:
        return None
    height, width = image[1:]
    if not isinstance(height, int) or not isinstance(width, int):
        return None
    pads = tuple(attribute_value(node, "pads", (0,) * 4))
    rows = _Rows(batch if isinstance(batch, int) else None, channels, (height, width), (taps[2], taps[3]), pads[:2], pads[2:])
    return rows if min(*rows.out_sizes, height, width, *pads) >= 0 and min(*rows.out_sizes, *rows.kernel) > 0 else None


def _product(b: Builder, node: ir.Node, rows: _Rows) -> Tensor:
    x, weight, *bias = (b.tensor(value) for value in node.inputs if value is not None)
    channels, (taps, _), width, (out_height, out_width) = rows.channels, rows.kernel, rows.sizes[1], rows.out_sizes
    image = b.op("Transpose", x, perm=[1, 0, 2, 3])
    if rows.begin[0] or rows.end[0]:
        image = b.op("Pad", image, b.integers([0, 0, rows.begin[0], 0, 0, 0, rows.end[0], 0]))
    read = np.arange(out_height)[:, None] + np.arange(taps)
    windows = b.op("Gather", image, b.constant(read), axis=2)
    windows = b.op("Reshape", windows, b.integers([channels, -1, taps * width]))
    # Products with zeros and ones are exact.
    by_row = b.op("Reshape", weight, b.integers([channels * taps, rows.kernel[1]]))
    placed = b.op("MatMul", by_row, b.constant(_diagonals(rows).astype(x.dtype.numpy())))
    product = b.op("MatMul", windows, b.op("Reshape", placed, b.integers([channels, taps * width, out_width])))
    y = b.op("Reshape", product, b.integers([channels, -1, out_height, out_width]))
    y = b.op("Transpose", y, perm=[1, 0, 2, 3], like=b.tensor(node.outputs[0]))
    return y + b.op("Reshape", bias[0], b.integers([channels, 1, 1])) if bias else y


def _diagonals(rows: _Rows) -> np.ndarray:
    """Return a mask [kw, W Wo]: true at (v, w) of tap j if output w reads entry v of a row through it, v = w + j - begin."""
    out_width, width = rows.out_sizes[1], rows.sizes[1]
    met = np.arange(rows.kernel[1])[:, None, None] + np.arange(out_width) - rows.begin[1]
    return (met == np.arange(width)[:, None]).reshape(rows.kernel[1], width * out_width)
