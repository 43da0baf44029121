"""Draws from a key: random words, keep masks, dropout.

An element's word depends only on the key, the stream and the element's place: no order, no hidden state, the same bits on
every runtime and with any number of threads.

The elements form a matrix: its rows are the first half of the axes (the larger half if the number is odd), its columns the
rest. Each row and each column has a well-mixed word, which costs almost nothing, and an element's word is mixed from the two.
That takes five passes over the elements; mixing the index of each element would take twelve.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.random.keys import KEY_DTYPE, mix, stream_key
from burnish.random.places import NOT_NOTED, Numbered, Places

_WORDS = 2**32


def uniform_bits(builder: Builder, key: Tensor, stream: int, like: Tensor, numbered: Numbered = NOT_NOTED) -> Tensor:
    """Emit one random 32-bit word per element.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2]; see ``burnish.random.initial_key``.
        stream: number of this consumer of the key, from 0 to 2**32 - 1.
        like: a tensor with the shape of the result; any rank, any dimension may be symbolic or unknown.
        numbered: position of the samples in the result, for sessions with several workers.

    Returns:
        uint32, with the shape of ``like``.
    """
    words = _words(builder, key, stream, like, numbered)
    words = builder.op("BitwiseXor", words, builder.op("BitShift", words, 16, direction="RIGHT"))
    return _shaped(words, like)


def keep_mask(
    builder: Builder, key: Tensor, stream: int, like: Tensor, ratio: Tensor | float, numbered: Numbered = NOT_NOTED
) -> Tensor:
    """Emit a mask that is true with probability 1 - ratio (to within 2**-32): always for ratio 0, never for ratio 1.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key, from 0 to 2**32 - 1.
        like: a tensor with the shape of the mask.
        ratio: share to drop, in [0, 1]; a floating-point scalar tensor if known only at run time.
        numbered: see ``uniform_bits``.

    Returns:
        bool, with the shape of ``like``.

    Raises:
        ConfigurationError: the ratio is known and outside [0, 1].
    """
    known = _known(ratio)
    words = _words(builder, key, stream, like, numbered)
    if known is None:
        assert isinstance(ratio, Tensor)
        exact = builder.cast(_scalar(ratio), ir.DataType.DOUBLE)
        # All words are below 2**32, so no threshold can say "never"; the second condition does.
        threshold = builder.op("Min", builder.op("Floor", exact * float(_WORDS) + 0.5), float(_WORDS - 1))
        drawn = builder.op("GreaterOrEqual", words, builder.cast(threshold, KEY_DTYPE))
        return _shaped(builder.op("And", drawn, builder.op("Less", exact, 1.0)), like)
    if known >= 1.0:
        return _shaped(builder.op("Less", words, 0), like)
    return _shaped(builder.op("GreaterOrEqual", words, min(int(known * _WORDS + 0.5), _WORDS - 1)), like)


def dropout(
    builder: Builder, x: Tensor, ratio: Tensor | float, key: Tensor, stream: int, numbered: Numbered = NOT_NOTED
) -> Tensor:
    """Emit dropout in training: ``x * mask / (1 - ratio)``, x for ratio 0, zeros for ratio 1.

    Source: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014, with the scale in
    training, so that inference does nothing.

    Args:
        builder: emits into the graph.
        x: floating-point, any shape.
        ratio: share to drop, in [0, 1]; a floating-point scalar tensor if known only at run time.
        key: uint32, shape [2].
        stream: number of this consumer of the key; every dropout of a graph has its own.
        numbered: see ``uniform_bits``.

    Returns:
        Dtype and shape of ``x``.

    Raises:
        ConfigurationError: the ratio is known and outside [0, 1].
    """
    known = _known(ratio)
    if known == 0.0:
        return builder.op("Identity", x)
    if known == 1.0:
        # A product instead of a constant, so that the values before it have a gradient of zero.
        return x * 0.0
    scale: Tensor | float
    if known is None:
        assert isinstance(ratio, Tensor)
        rest = 1.0 - builder.cast(_scalar(ratio), ir.DataType.DOUBLE)
        nothing = builder.op("LessOrEqual", rest, 0.0)
        divisor = builder.op("Where", nothing, builder.scalar(1.0, rest), rest, like=rest)
        factor = builder.op("Where", nothing, builder.scalar(0.0, rest), 1.0 / divisor, like=rest)
        scale = builder.cast(factor, x.dtype)
    else:
        scale = 1.0 / (1.0 - known)
    # A product forward and a product backward: a selection costs four times as much on most runtimes.
    mask = builder.cast(keep_mask(builder, key, stream, x, ratio, numbered), x.dtype)
    return builder.op("Mul", x, mask * scale, like=x)


def _words(builder: Builder, key: Tensor, stream: int, like: Tensor, numbered: Numbered) -> Tensor:
    """Emit a word per element, uint32, shape [rows, columns]; its high bits are good, its low bits less so.

    With only one multiplication the words at the corners of a rectangle would be correlated.
    """
    row_key, column_key = builder.op("Split", stream_key(builder, key, stream), num_outputs=2, outputs=2)
    rows, columns = _extents(builder, like)
    row_words = _place_words(row_key, rows, numbered.rows)
    column_words = _place_words(column_key, columns, numbered.columns)
    words = builder.op("BitwiseXor", builder.op("Unsqueeze", row_words, builder.integers([1])), column_words) * 0x7FEB352D
    return builder.op("BitwiseXor", words, builder.op("BitShift", words, 15, direction="RIGHT")) * 0x846CA68B


def _place_words(key: Tensor, extent: Tensor, numbered: Places) -> Tensor:
    """Emit a mixed word for each place from 0 to extent - 1: uint32, one-dimensional."""
    builder = key.builder
    places = builder.op("Range", builder.scalar(0, extent), extent, builder.scalar(1, extent))
    producer = places.value.producer()
    assert producer is not None
    numbered.write(producer)
    return mix(builder.op("BitwiseXor", builder.cast(places, KEY_DTYPE), key))


def _extents(builder: Builder, like: Tensor) -> tuple[Tensor, Tensor]:
    if like.shape is None:
        shape = builder.op("Shape", like)
        half = builder.op("Div", builder.op("Shape", shape) + 1, 2)
        leading = builder.op("Slice", shape, builder.integers([0]), half)
        trailing = builder.op("Slice", shape, half, builder.integers([np.iinfo(np.int64).max]))
        return _product(leading), _product(trailing)
    half_rank = (len(like.shape) + 1) // 2
    extents = []
    for start, end in ((0, half_rank), (half_rank, len(like.shape))):
        known = [dimension for dimension in like.shape.dims[start:end] if isinstance(dimension, int)]
        if len(known) == end - start:
            extents.append(builder.constant(np.asarray(math.prod(known), np.int64)))
        else:
            extents.append(_product(builder.op("Shape", like, start=start, end=end)))
    return extents[0], extents[1]


def _product(extents: Tensor) -> Tensor:
    builder = extents.builder
    padded = builder.op("Concat", builder.integers([1]), extents, axis=0)
    return builder.op("ReduceProd", padded, builder.integers([0]), keepdims=0)


def _shaped(matrix: Tensor, like: Tensor) -> Tensor:
    builder = matrix.builder
    return builder.op("Reshape", matrix, builder.op("Shape", like), allowzero=1, shape=like.shape)


def _scalar(ratio: Tensor) -> Tensor:
    """Return the ratio as a scalar: models may give a list of one number, which would add an axis."""
    builder = ratio.builder
    return ratio if ratio.rank == 0 else builder.op("Reshape", ratio, builder.integers([]))


def _known(ratio: Tensor | float) -> float | None:
    """Return the ratio, checked, if it is known when the graph is built."""
    if isinstance(ratio, Tensor):
        if ratio.array is None:
            return None
        ratio = float(ratio.array.reshape(()))
    if not 0.0 <= ratio <= 1.0:
        raise ConfigurationError(f"a dropout ratio must be between 0 and 1, not {ratio}")
    return float(ratio)
