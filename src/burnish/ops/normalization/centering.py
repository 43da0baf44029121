"""What batch normalization takes off its input: near the mean of each channel, so that sums of what is left keep their digits.

It is the mean of some rows. Of the result of a pointwise convolution that is the weight times the mean of the same rows of the
convolution's input, so it is known before the convolution runs: its bias takes it off, which saves a pass over the result.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, static_shape
from burnish.graph.uses import producer_of
from burnish.ops.normalization.statistics import channel_axes, per_channel
from burnish.ops.registry import Operation
from burnish.ops.semantic import SemanticOperator

SMALLEST_CENTERED_RESULT = 512
"""From how many outputs per channel on a pass over them costs more than the bias, and more than its computation."""


def centered(op: Operation, backward: SemanticOperator) -> tuple[Tensor, Tensor]:
    """Return the pilot [C] and the first operand x [N, C, ...] minus it.

    Args:
        op: the normalization of x.
        backward: the operator of its gradient, whose lowering does not read x.
    """
    x = op.required(0)
    convolution = _pointwise_convolution(op, backward)
    if convolution is None:
        pilot = _mean_of_rows(x)
        return pilot, x - per_channel(pilot, x)
    b = Builder(op.builder.graph, before=convolution)
    source, weight, *bias = (b.tensor(value) for value in convolution.inputs if value is not None)
    outputs, inputs = (static_shape(weight.value) or ())[:2]
    matrix = b.op("Reshape", weight, b.integers([outputs, inputs]))
    column = b.op("Reshape", _mean_of_rows(source), b.integers([inputs, 1]))
    mean = b.op("Reshape", b.op("MatMul", matrix, column), b.integers([outputs]))
    result = b.op("Conv", source, weight, -mean, like=x)
    for reader, index in list(x.value.uses()):
        if reader.op_type == "Shape":
            reader.replace_input_with(index, result.value)
    pilot = mean + bias[0] if bias else mean
    return op.builder.tensor(pilot.value), op.builder.tensor(result.value)


def _mean_of_rows(x: Tensor) -> Tensor:
    """The mean [C] of rows of the first sample of ``x`` [N, C, ...]: all, or of an image of many every second or fourth.

    Of the mean over M of the N elements of a channel it is known that it is within sqrt(N / M) standard deviations of their mean.
    """
    b, step = x.builder, max(1, min(4, (x.dimension(2) or 0) // 8 if (x.rank or 0) > 3 else 1))
    if step == 1:
        rows = b.op("Slice", x, b.integers([0]), b.integers([1]), b.integers([0]))
    else:
        ends = b.integers([1, np.iinfo(np.int64).max])
        rows = b.op("Slice", x, b.integers([0, 0]), ends, b.integers([0, 2]), b.integers([1, step]))
    return b.op("ReduceMean", rows, b.integers(channel_axes(x)), keepdims=0, shape=[x.dimension(1)])


def _pointwise_convolution(op: Operation, backward: SemanticOperator) -> ir.Node | None:
    """The convolution of large images with one tap and no strides, of whose result others read the shape at most."""
    result = op.required(0).value
    node = producer_of(result, "Conv")
    if node is None or node.graph is not op.node.graph or result.is_graph_output():
        return None
    if not all(reader is op.node or reader.op_type == "Shape" or backward.is_of(reader) for reader, _ in result.uses()):
        return None
    x, weight = node.inputs[:2]
    taps = None if weight is None else static_shape(weight)
    if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or taps is None or len(taps) != 4:
        return None
    image = [extent for extent in x.shape.dims[2:] if isinstance(extent, int)]
    plain = {"strides": 1, "pads": 0}
    is_product = (
        taps[2:] == (1, 1)
        and attribute_value(node, "group", 1) == 1
        and attribute_value(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and all(set(attribute_value(node, name, (number,))) == {number} for name, number in plain.items())
    )
    return node if is_product and len(image) == 2 and prod(image) >= max(SMALLEST_CENTERED_RESULT, taps[1]) else None
