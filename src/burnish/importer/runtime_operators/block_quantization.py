"""Weights in few bits with a scale for each block of them: products with such a matrix, and rows of such a table.

The integers stay as they are in the file, and are no weights. Neither are their scales: they belong to the integers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, held, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank

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
    rows, scales = (builder.op("Gather", table, indices, axis=axis) for table in (_in_bytes(data), held(op.required(2))))
    zeros = None if zeros is None else builder.op("Gather", _in_bytes(zeros), indices, axis=axis)
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


def _in_bytes(integers: Tensor) -> Tensor:
    """Integers in a dtype that the standard's Gather takes: of four bits it takes none."""
    wider = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8}.get(integers.dtype)
    return integers if wider is None else integers.builder.cast(integers, wider)


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


_FOUR_BIT_FLOATS = (
    (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25),
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""The numbers of bitsandbytes' formats FP4, whose other half is negative, and NF4 (Dettmers et al. 2023, appendix E)."""


@rewrites("MatMulBnb4")
def matmul_of_four_bit_floats(op: Operation) -> Results:
    """``A Wᵀ`` of a matrix in bitsandbytes' four bits, whose blocks run over the rows one after another."""
    builder, a, kind = op.builder, op.input, op.attribute("quant_type")
    rows, columns, block = op.attribute("N"), op.attribute("K"), op.attribute("block_size")
    if kind not in (0, 1) or op.attribute("training_mode", 0) or not op.attribute("transB", 1):
        return None
    numbers = _FOUR_BIT_FLOATS[kind] if kind else (*_FOUR_BIT_FLOATS[0], *(-number for number in _FOUR_BIT_FLOATS[0]))
    table = builder.constant(np.array(numbers, np.float32))
    shifts = builder.constant(np.array([4, 0], np.uint8))
    packed = builder.op("Reshape", op.required(1), builder.integers([-1, 1]))
    codes = builder.op(
        "BitwiseAnd", builder.op("BitShift", packed, shifts, direction="RIGHT"), builder.constant(np.array(15, np.uint8))
    )
    codes = builder.op("Reshape", codes, builder.integers([-1]))
    codes = builder.op("Slice", codes, builder.integers([0]), builder.integers([rows * columns]), builder.integers([0]))
    values = builder.op("Gather", table, builder.cast(codes, ir.DataType.INT64), axis=0)
    order = builder.constant(np.arange(rows * columns) // block)
    scales = builder.op("Gather", builder.op("Reshape", held(op.required(2)), builder.integers([-1])), order, axis=0)
    weight = builder.op("Reshape", builder.cast(values, scales.dtype) * scales, builder.integers([rows, columns]))
    return builder.op("MatMul", a, builder.op("Transpose", builder.cast(weight, a.dtype), perm=[1, 0]))
