"""Local response normalization: across neighboring channels."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.ops.positions import extent, joined, reshape_as
from burnish.ops.registry import Operation, gradient


@gradient("LRN")
def local_response_normalization(op: Operation, dy: Tensor) -> Tensor:
    """With S = bias + alpha / size * (sum of x^2 over the window of a channel) and y = x S^-beta (Krizhevsky et al. 2012, 3.3):

    dx = dy S^-beta - 2 alpha beta / size * x * (sum of dy y / S over the channels whose window holds this one).

    The window of an even size reaches one channel further forward than back; the second sum has the mirrored window.
    """
    x, y = op.input, op.output
    size = int(op.attribute("size"))
    alpha, beta, bias = op.attribute("alpha", 1e-4), op.attribute("beta", 0.75), op.attribute("bias", 1.0)
    before = (size - 1) // 2
    after = size - 1 - before
    scale = _channel_sum(x * x, before, after) * (alpha / size) + bias
    through_scale = x * _channel_sum(dy * y / scale, after, before)
    return dy * scale**-beta - through_scale * (2 * alpha * beta / size)


def _channel_sum(x: Tensor, before: int, after: int) -> Tensor:
    """Sum x [N, C, ...] over each channel and its neighbors: ``before`` of them below, ``after`` above."""
    builder = x.builder
    size = before + after + 1
    target = joined(builder, [builder.integers([0, 1]), extent(x, 1), builder.integers([-1])])
    planes = builder.op("Reshape", x, target)
    mean = builder.op("AveragePool", planes, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1)
    return reshape_as(mean * size, x)
