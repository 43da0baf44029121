"""What attention adds to its scores by how far keys are from queries."""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, rewrites
from burnish.operators import Operation
from burnish.operators.attention_decomposition import split_heads

_INDEX, _FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


@rewrites("RelativePositionBias")
def relative_position_bias(op: Operation) -> Results:
    """Rows of a table, by buckets of distances that grow with the distance (T5), ``[1, heads, queries, keys]``.

    Half of the buckets hold one distance each, the others reach up to ``max_distance`` by equal factors.
    """
    builder, table = op.builder, op.input
    buckets, is_both = table.dimension(0), bool(op.attribute("is_bidirectional", 0))
    if buckets is None:
        return None
    query, key = (_places(op, index) for index in (1, 2))
    distance = builder.op("Unsqueeze", key, builder.integers([0])) - builder.op("Unsqueeze", query, builder.integers([1]))
    zero, first = builder.scalar(0, _INDEX), None
    if is_both:
        buckets //= 2
        first = builder.cast(builder.op("Greater", distance, zero), _INDEX) * buckets
        distance = builder.op("Abs", distance)
    else:
        distance = builder.op("Max", builder.op("Neg", distance), zero)
    exact = buckets // 2
    factor = (buckets - exact) / math.log(op.attribute("max_distance") / exact)
    ratio = builder.cast(builder.op("Max", distance, builder.scalar(1, _INDEX)), _FLOAT) / float(exact)
    far = builder.cast(builder.op("Log", ratio) * factor, _INDEX) + exact
    far = builder.op("Min", far, builder.scalar(buckets - 1, _INDEX))
    bucket = builder.op("Where", builder.op("Less", distance, builder.scalar(exact, _INDEX)), distance, far)
    rows = builder.op("Gather", table, bucket if first is None else bucket + first, axis=0)
    return builder.op("Unsqueeze", builder.op("Transpose", rows, perm=[2, 0, 1]), builder.integers([0]))


def _places(op: Operation, index: int) -> Tensor:
    """The numbers from 0 up to a length that the node takes."""
    builder = op.builder
    length = builder.op("Reshape", builder.cast(op.required(index), _INDEX), builder.integers([]))
    return builder.op("Range", builder.scalar(0, _INDEX), length, builder.scalar(1, _INDEX))


@rewrites("GatedRelativePositionBias")
def gated_relative_position_bias(op: Operation) -> Results:
    """A bias of positions times a gate of each query (WavLM): ``g (r eco - 1) + 2``; packed sequences stay.

    Both gates are sigmoids of sums over halves of a projection of the query in each head.
    """
    builder, heads = op.builder, op.attribute("num_heads")
    if op.optional(6) is not None:
        return None
    query = split_heads(op.input + op.required(1), heads)
    projected = builder.op("MatMul", query, op.required(3)) + op.required(4)
    halves = builder.op("Split", projected, axis=-1, num_outputs=2, outputs=2)
    first, second = (builder.op("Sigmoid", builder.op("ReduceSum", half, builder.integers([-1]), keepdims=1)) for half in halves)
    return (first * (second * op.required(5) - 1.0) + 2.0) * op.required(2)
