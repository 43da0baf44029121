"""Weights in few bits with a scale for each block of them: products with such a matrix, and rows of such a table.

The integers stay as they are in the file, and are no weights. Neither are their scales: they belong to the integers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, held, rewrites
from burnish.ops import Operation
from burnish.ops.positions import known_rank

_BYTE = ir.DataType.UINT8
_PACKED_BITS = (2, 4, 8)


@rewrites("MatMulNBits")
def matmul_of_few_bits(op: Operation) -> Results:
    """``A Wᵀ + bias`` of a matrix W [N, K] in blocks along K: ``(integer - zero point) * scale``."""
    builder, a, bits = op.builder, op.input, op.attribute("bits", 4)
    rows, columns, block = op.attribute("N"), op.attribute("K"), op.attribute("block_size")
    if bits not in _PACKED_BITS:
        return None
    blocks = -(-columns // block)
    integers = builder.op("Reshape", _unpacked(op.required(1), bits), builder.integers([rows, -1]))
    integers = builder.op("Slice", integers, builder.integers([0]), builder.integers([columns]), builder.integers([1]))
    order = op.optional(4)
    if order is None:
        order = builder.constant(np.arange(columns) // block)
    else:
        order = builder.op("Slice", order, builder.integers([0]), builder.integers([columns]), builder.integers([0]))
    scales = builder.op("Reshape", held(op.required(2)), builder.integers([rows, blocks]))
    zeros = _zero_points(op.optional(3), rows, bits)
    weight = _dequantized(integers, scales, zeros, order, 1, 2 ** (bits - 1))
    product = builder.op("MatMul", a, builder.op("Transpose", builder.cast(weight, a.dtype), perm=[1, 0]))
    bias = op.optional(5)
    return product if bias is None else product + bias


@rewrites("GatherBlockQuantized")
def gather_of_few_bits(op: Operation) -> Results:
    """Rows of a table in few bits."""
    builder, data, indices, bits = op.builder, op.input, op.required(1), op.attribute("bits", 4)
    rank, block = known_rank(op, data), op.attribute("block_size", 128)
    axis, blocked = (op.attribute(name, default) % rank for name, default in (("gather_axis", 0), ("quantize_axis", 1)))
    is_packed = data.dtype == _BYTE
    extent = data.dimension(blocked)
    if bits not in _PACKED_BITS or extent is None or axis == blocked or (is_packed and blocked != rank - 1):
        return None
    if not is_packed and builder.opset < 21:
        return None
    extent = extent * (8 // bits) if is_packed else extent
    zeros = op.optional(3)
    rows, scales = (builder.op("Gather", table, indices, axis=axis) for table in (data, held(op.required(2))))
    zeros = None if zeros is None else builder.op("Gather", zeros, indices, axis=axis)
    along = blocked + known_rank(op, indices) - 1 if blocked > axis else blocked
    if is_packed:
        rows, zeros = _unpacked(rows, bits), None if zeros is None else _unpacked(zeros, bits)
    order = builder.constant(np.arange(extent) // block)
    return _dequantized(rows, scales, zeros, order, along, 2 ** (bits - 1) if is_packed else 0)


def _dequantized(integers: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor, axis: int, default: int) -> Tensor:
    """``(integer - zero point) * scale``, the block of each element along ``axis`` told by ``order``."""
    builder, dtype = integers.builder, scales.dtype
    values = builder.cast(integers, dtype)
    if zeros is not None:
        values = values - builder.op("Gather", builder.cast(zeros, dtype), order, axis=axis)
    elif default:
        values = values - default
    return values * builder.op("Gather", scales, order, axis=axis)


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Bytes to the numbers in them, the lowest bits first, along the last axis."""
    if bits == 8:
        return x
    builder, rank = x.builder, x.rank or 0
    shifts = builder.constant(np.arange(0, 8, bits, dtype=np.uint8))
    apart = builder.op("BitShift", builder.op("Unsqueeze", x, builder.integers([-1])), shifts, direction="RIGHT")
    numbers = builder.op("BitwiseAnd", apart, builder.constant(np.array(2**bits - 1, np.uint8)))
    return builder.op("Reshape", numbers, builder.integers([0] * (rank - 1) + [-1]))


def _zero_points(zeros: Tensor | None, rows: int, bits: int) -> Tensor | None:
    """``[rows, blocks]`` or more columns: numbers, or as many bits as the weights have, packed."""
    if zeros is None:
        return None
    by_row = zeros.builder.op("Reshape", held(zeros), zeros.builder.integers([rows, -1]))
    return _unpacked(by_row, bits) if zeros.dtype == _BYTE else by_row
