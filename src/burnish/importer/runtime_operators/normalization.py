"""Layer and root-mean-square normalization, also fused with preceding sums and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Tensor
from burnish.importer.runtime_operators.registry import Results, channels_first, channels_last, is_read, rewrites
from burnish.operators import Operation
from burnish.operators.attention_decomposition import places
from burnish.operators.positions import extent, known_rank

_SKIP_EPSILON = 1e-12


def _layer(
    op: Operation, x: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float, axis: int = -1, statistics: int = 0
) -> tuple[Tensor, ...]:
    operands = [x, *(None if operand is None else op.builder.cast(operand, x.dtype) for operand in (scale, bias))]
    attributes: dict[str, Any] = {"axis": axis, "epsilon": epsilon}
    if statistics:
        return op.builder.op("LayerNormalization", *operands, outputs=1 + statistics, **attributes)
    return (op.builder.op("LayerNormalization", *operands, like=x, **attributes),)


def _root_mean_square(x: Tensor, scale: Tensor, epsilon: float, axes: Sequence[int] = (-1,)) -> tuple[Tensor, Tensor]:
    """Emit RMS normalization as recognizable nodes, and the inverse deviation; 16 bits are computed in float32."""
    builder = x.builder
    wide = builder.cast(x, ir.DataType.FLOAT) if x.dtype in SIXTEEN_BIT else x
    power = builder.op("ReduceMean", wide * wide, builder.integers(axes), keepdims=1)
    inverse = builder.op("Reciprocal", builder.op("Sqrt", power + epsilon))
    return builder.cast(wide * inverse, x.dtype) * builder.cast(scale, x.dtype), inverse


def _statistics_read(op: Operation, most: int) -> int:
    return max((index for index in range(1, most + 1) if is_read(op, index)), default=0)


@rewrites("LayerNormalization")
def layer_normalization(op: Operation) -> tuple[Tensor, ...]:
    """Rewrite ONNX Runtime's form from before opset 17."""
    axis, epsilon = op.attribute("axis", -1), op.attribute("epsilon", 1e-5)
    return _layer(op, op.input, op.required(1), op.optional(2), epsilon, axis, _statistics_read(op, 2))


@rewrites("SimplifiedLayerNormalization")
def simplified_layer_normalization(op: Operation) -> tuple[Tensor, ...]:
    """Rewrite root-mean-square normalization over the axes from ``axis`` on."""
    x, axis = op.input, op.attribute("axis", -1)
    axes = range(axis, 0) if axis < 0 else range(axis, known_rank(op, x))
    return _root_mean_square(x, op.required(1), op.attribute("epsilon", 1e-5), list(axes))


def _summed(op: Operation, bias: Tensor | None) -> Tensor:
    total = op.input + op.required(1)
    return total if bias is None else total + bias


@rewrites("SkipLayerNormalization")
def skip_layer_normalization(op: Operation) -> tuple[Tensor | None, ...]:
    """Normalize the sum of an input, a skip connection and a bias; the fourth output is the sum."""
    total, count = _summed(op, op.optional(4)), _statistics_read(op, 2)
    layer = _layer(op, total, op.required(2), op.optional(3), op.attribute("epsilon", _SKIP_EPSILON), statistics=count)
    return *layer, *(None for _ in range(2 - count)), total


@rewrites("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(op: Operation) -> tuple[Tensor | None, ...]:
    total = _summed(op, op.optional(3))
    y, inverse = _root_mean_square(total, op.required(2), op.attribute("epsilon", _SKIP_EPSILON))
    return y, None, inverse, total


@rewrites("EmbedLayerNormalization")
def embed_layer_normalization(op: Operation) -> tuple[Tensor | None, ...]:
    """Normalize the sum of word, position and segment embeddings; also return the token counts and the sum."""
    operands = (op.required(2), op.required(3), op.optional(4), op.required(5), op.required(6))
    return _embedded(op, operands, op.optional(8))


@rewrites("QEmbedLayerNormalization")
def embed_layer_normalization_of_integers(op: Operation) -> tuple[Tensor | None, ...]:
    """Do the same for integer tables, scale and bias, whose scales and zero points come last."""

    def numbers(index: int) -> Tensor | None:
        x = op.optional(index)
        return None if x is None else op.builder.op("DequantizeLinear", x, op.required(index + 6), op.optional(index + 11))

    words, positions, segments, scale, bias = map(numbers, range(2, 7))
    assert words is not None
    assert positions is not None
    assert scale is not None
    assert bias is not None
    return _embedded(op, (words, positions, segments, scale, bias), None)[:2]


def _embedded(
    op: Operation, operands: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor], positions: Tensor | None
) -> tuple[Tensor | None, ...]:
    builder, words, segments = op.builder, op.input, op.optional(1)
    total = builder.op("Gather", operands[0], words, axis=0)
    if positions is None:
        positions = places(builder, extent(words, 1))
    total = total + builder.op("Gather", operands[1], positions, axis=0)
    if segments is not None and operands[2] is not None:
        total = total + builder.op("Gather", operands[2], segments, axis=0)
    (y,) = _layer(op, total, operands[3], operands[4], op.attribute("epsilon", _SKIP_EPSILON))
    return y, _tokens(op, words) if is_read(op, 1) else None, total


def _tokens(op: Operation, words: Tensor) -> Tensor:
    """Return the number of masked-in positions per row, int32; 0 without a mask."""
    builder, mask = op.builder, op.optional(7)
    if mask is None:
        zero = ir.Tensor(np.zeros(1, np.int32))
        return builder.op("ConstantOfShape", extent(words, 0), value=zero, dtype=ir.DataType.INT32)
    marked = builder.op("Equal", mask, builder.scalar(1, mask))
    return builder.op("ReduceSum", builder.cast(marked, ir.DataType.INT32), builder.integers([1]), keepdims=0)


@rewrites("GroupNorm")
def group_norm(op: Operation) -> Results:
    """Rewrite group normalization with scale and bias per channel, by default channels last, optionally with SiLU."""
    return _grouped(op, op.input)


@rewrites("SkipGroupNorm")
def skip_group_norm(op: Operation) -> Results:
    """Normalize a sum, which is the second output; the skip connection may have one number per sample and channel."""
    builder, x, skip, bias = op.builder, op.input, op.required(3), op.optional(4)
    is_last = bool(op.attribute("channels_last", 1))
    if known_rank(op, skip) == 2:
        skip = builder.op("Unsqueeze", skip, builder.integers([1, 2] if is_last else [2, 3]))
    total = x + skip
    if bias is not None:
        total = total + (bias if is_last else builder.op("Unsqueeze", bias, builder.integers([1, 2])))
    return _grouped(op, total), total


def _grouped(op: Operation, x: Tensor) -> Tensor:
    builder, groups = op.builder, op.attribute("groups")
    is_last = bool(op.attribute("channels_last", 1))
    x = channels_first(op, x) if is_last else x
    scale, bias = (builder.cast(op.required(index), x.dtype) for index in (1, 2))
    rows = builder.op("Reshape", x, builder.integers([0, groups, -1]))
    ones = builder.cast(builder.constant(np.ones(groups)), x.dtype)
    zeros = builder.cast(builder.constant(np.zeros(groups)), x.dtype)
    normal = builder.op("InstanceNormalization", rows, ones, zeros, epsilon=op.attribute("epsilon", 1e-5))
    y = builder.op("Reshape", normal, builder.op("Shape", x))
    after = builder.integers(range(1, known_rank(op, x) - 1))
    y = y * builder.op("Unsqueeze", scale, after) + builder.op("Unsqueeze", bias, after)
    y = y * builder.op("Sigmoid", y) if op.attribute("activation") else y
    return channels_last(op, y) if is_last else y
