"""Operators on quantized integers, from the standard and from ONNX Runtime's quantizer.

Each becomes its floating-point operator between DequantizeLinear and QuantizeLinear. Runtimes with kernels fuse the three again;
gradients pass through them as if nothing were rounded.

Low-bit weights with a scale per block are used by products and by table lookups. Their integers stay as in the file and, like
their scales, are no weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.attention import attended
from burnish.importer.runtime_operators.registry import Results, channels_first, channels_last, held, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank

_EIGHT_BITS = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
_OTHER_INTEGERS_SINCE = 21
"""First opset with 4-bit and 16-bit integers."""


def _is_standard(op: Operation, integers: Tensor | None) -> bool:
    known = integers is None or integers.dtype in _EIGHT_BITS or op.builder.opset >= _OTHER_INTEGERS_SINCE
    return known and not op.attribute("block_size", 0) and op.attribute("output_dtype") is None


@rewrites("QuantizeLinear")
def quantize_linear(op: Operation) -> Results:
    """Rewrite unless quantized in blocks or to integers that the model's opset lacks."""
    x, scale, zero = op.input, op.required(1), op.optional(2)
    return op.builder.op("QuantizeLinear", x, scale, zero, axis=op.attribute("axis")) if _is_standard(op, zero) else None


@rewrites("DequantizeLinear")
def dequantize_linear(op: Operation) -> Results:
    """Rewrite with the same restrictions."""
    x, scale, zero = op.input, op.required(1), op.optional(2)
    return op.builder.op("DequantizeLinear", x, scale, zero, axis=op.attribute("axis")) if _is_standard(op, x) else None


_POOLING = ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides")
_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _grid(scale: Tensor) -> Tensor:
    return scale.builder.op("Reshape", scale, scale.builder.integers([])) if scale.rank == 1 and _is_one(scale) else scale


def _is_one(scale: Tensor) -> bool:
    return scale.rank == 0 or (scale.rank == 1 and scale.dimension(0) == 1)


def _numbers(x: Tensor, scale: Tensor, zero: Tensor | None, axis: int | None = None) -> Tensor:
    if _is_one(scale):
        scale, zero, axis = _grid(scale), None if zero is None else _grid(zero), None
    return x.builder.op("DequantizeLinear", x, scale, zero, axis=axis)


def _operand(op: Operation, index: int, axis: int | None = None) -> Tensor:
    return _numbers(op.required(index), op.required(index + 1), op.optional(index + 2), axis)


def _result(op: Operation, y: Tensor, index: int, like: int = 0) -> Tensor:
    scale, zero, dtype = _grid(op.required(index)), op.optional(index + 1), op.required(like).dtype
    zero = op.builder.constant(np.zeros((), dtype.numpy())) if zero is None else _grid(zero)
    return op.builder.op("QuantizeLinear", y, scale, zero)


def _summand(bias: Tensor, *scales: Tensor) -> Tensor:
    """Return a dequantized bias; its scale is the product of the factors' scales."""
    builder = bias.builder
    arrays = [scale.array for scale in scales]
    if any(array is None for array in arrays):
        return builder.cast(bias, scales[0].dtype) * (_grid(scales[0]) * _grid(scales[1]))
    product = np.asarray(arrays[0]) * np.asarray(arrays[1])
    scale = builder.constant(product.reshape(()) if product.size == 1 else product)
    return builder.op("DequantizeLinear", bias, scale, axis=None if product.size == 1 else 0)


def _fits(scale: Tensor) -> bool:
    return scale.rank in (0, 1)


@rewrites("QLinearConv")
def convolution(op: Operation) -> Results:
    """Rewrite a convolution with channels second or last."""
    x, w, bias = _operand(op, 0), _operand(op, 3, axis=0), op.optional(8)
    if op.attribute("channels_last", 0):
        x = channels_first(op, x)
    added = None if bias is None else _summand(bias, op.required(1), op.required(4))
    y = op.builder.op("Conv", x, w, added, **{name: op.attribute(name) for name in _CONVOLUTION})
    return _result(op, channels_last(op, y) if op.attribute("channels_last", 0) else y, 6)


@rewrites("QLinearMatMul")
def product(op: Operation) -> Results:
    """Rewrite a matrix product; scales may be per row of the first or column of the second matrix."""
    if not all(_fits(op.required(index)) for index in (1, 4)):
        return None
    return _result(op, op.builder.op("MatMul", _operand(op, 0, axis=-2), _operand(op, 3, axis=-1)), 6)


@rewrites("QGemm")
def general_product(op: Operation) -> Results:
    """Emit ``alpha * A B + C``, not quantized if the result has no scale."""
    transposed = {name: op.attribute(name, 0) for name in ("transA", "transB")}
    a, b, bias = _operand(op, 0), _operand(op, 3, axis=0 if transposed["transB"] else 1), op.optional(6)
    added = None if bias is None else _summand(bias, op.required(1), op.required(4))
    alpha = op.attribute("alpha", 1.0)
    added = added if added is None or alpha == 1.0 else added * alpha
    y = op.builder.op("Gemm", a, b, added, alpha=alpha, **transposed)
    return y if op.optional(7) is None else _result(op, y, 7)


@rewrites("MatMulIntegerToFloat")
def product_to_numbers(op: Operation) -> Results:
    """Rewrite a product of integers with a floating-point result."""
    a, b, bias = op.input, op.required(1), op.optional(6)
    y = op.builder.op(
        "MatMul",
        _numbers(a, op.required(2), op.optional(4), axis=-2),
        _numbers(b, op.required(3), op.optional(5), axis=-1),
    )
    return y if bias is None else y + bias


@rewrites("DynamicQuantizeMatMul")
def product_of_rounded_numbers(op: Operation) -> Results:
    """Rewrite a product with integers whose other factor is quantized by its own minimum and maximum."""
    builder, bias = op.builder, op.optional(4)
    integers, scale, zero = builder.op("DynamicQuantizeLinear", op.input, outputs=3)
    y = builder.op(
        "MatMul",
        builder.op("DequantizeLinear", integers, scale, zero),
        _numbers(op.required(1), op.required(2), op.optional(3), axis=-1),
    )
    return y if bias is None else y + bias


@rewrites("QAttention")
def attention_of_integers(op: Operation) -> Results:
    """Rewrite ``Attention`` of an integer input and matrix with floating-point results."""
    if op.attribute("do_rotary", 0) or op.attribute("past_present_share_buffer", 0):
        return None
    x = _numbers(op.input, op.required(3), op.optional(6))
    weight = _numbers(op.required(1), op.required(4), op.optional(7), axis=-1)
    return attended(op, x, weight, op.required(2), mask=op.optional(5), past=op.optional(8))


def _of_two(op_type: str) -> Callable[[Operation], Results]:
    def rule(op: Operation) -> Results:
        return _result(op, op.builder.op(op_type, _operand(op, 0), _operand(op, 3)), 6)

    return rule


rewrites("QLinearAdd")(_of_two("Add"))
rewrites("QLinearMul")(_of_two("Mul"))


@rewrites("QLinearSigmoid")
def sigmoid(op: Operation) -> Results:
    return _result(op, op.builder.op("Sigmoid", _operand(op, 0)), 3)


@rewrites("QLinearLeakyRelu")
def leaky_relu(op: Operation) -> Results:
    return _result(op, op.builder.op("LeakyRelu", _operand(op, 0), alpha=op.attribute("alpha")), 3)


@rewrites("QLinearSoftmax")
def softmax(op: Operation) -> Results:
    """Rewrite with the semantics of the attribute ``opset``: before 13 over all axes from ``axis`` on."""
    builder, x = op.builder, _operand(op, 0)
    if op.attribute("opset") >= 13:
        return _result(op, builder.op("Softmax", x, axis=op.attribute("axis", -1)), 3)
    rank = known_rank(op, x)
    axis = op.attribute("axis", -1) % rank
    if axis == rank - 1:
        return _result(op, builder.op("Softmax", x, axis=-1), 3)
    flat = builder.op("Softmax", builder.op("Flatten", x, axis=axis), axis=-1)
    return _result(op, builder.op("Reshape", flat, builder.op("Shape", x)), 3)


@rewrites("QLinearAveragePool")
def average_pool(op: Operation) -> Results:
    attributes = {name: op.attribute(name) for name in _POOLING}
    return _result(op, _pooled(op, lambda x: op.builder.op("AveragePool", x, **attributes)), 3)


@rewrites("QLinearGlobalAveragePool")
def global_average_pool(op: Operation) -> Results:
    return _result(op, _pooled(op, lambda x: op.builder.op("GlobalAveragePool", x)), 3)


def _pooled(op: Operation, pool: Callable[[Tensor], Tensor]) -> Tensor:
    x = _operand(op, 0)
    return channels_last(op, pool(channels_first(op, x))) if op.attribute("channels_last", 0) else pool(x)


@rewrites("QLinearReduceMean")
def reduce_mean(op: Operation) -> Results:
    """Emit the mean over the axes in an attribute, by default all."""
    axes = op.attribute("axes", ())
    named = op.builder.integers(axes) if axes else None
    return _result(op, op.builder.op("ReduceMean", _operand(op, 0), named, keepdims=op.attribute("keepdims", 1)), 3)


@rewrites("QLinearConcat")
def concat(op: Operation) -> Results:
    """Rewrite; inputs are the result's scale and zero point, then each operand with its own."""
    operands = [_operand(op, index) for index in range(2, len(op.node.inputs), 3)]
    return _result(op, op.builder.op("Concat", *operands, axis=op.attribute("axis")), 0, like=2)


@rewrites("QLinearWhere")
def where(op: Operation) -> Results:
    return _result(op, op.builder.op("Where", op.input, _operand(op, 1), _operand(op, 4)), 7, like=1)


@rewrites("DynamicQuantizeLSTM")
def lstm(op: Operation) -> Results:
    """Rewrite the standard's layer with integer weights, inputs first; its input is not rounded."""
    builder = op.builder
    weights = (_transposed(op, index, index + 7 + place) for place, index in enumerate((1, 2)))
    names = ("activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "input_forget")
    attributes = {name: op.attribute(name) for name in names}
    rest = (op.optional(index) for index in range(3, 8))
    return builder.op("LSTM", op.input, *weights, *rest, outputs=3, **attributes)


def _transposed(op: Operation, index: int, scale_index: int) -> Tensor:
    """Dequantize ``[directions, inputs, gates]`` to ``[directions, gates, inputs]``, with a scale per direction or per gate."""
    builder, scale, zero = op.builder, held(op.required(scale_index)), op.optional(scale_index + 1)
    axes = builder.integers([1, 2] if scale.rank == 1 else [1])
    numbers = builder.cast(op.required(index), scale.dtype)
    if zero is not None:
        numbers = numbers - builder.op("Unsqueeze", builder.cast(zero, scale.dtype), axes)
    return builder.op("Transpose", numbers * builder.op("Unsqueeze", scale, axes), perm=[0, 2, 1])


_BYTE = ir.DataType.UINT8
_PACKED_BITS = (2, 4, 8)


@rewrites("MatMulNBits")
def matmul_of_few_bits(op: Operation) -> Results:
    """Emit ``A Wᵀ + bias`` for a matrix W [N, K] in blocks along K: ``(integer - zero point) * scale``."""
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
    """Emit rows of a low-bit table."""
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
    """Emit ``(integer - zero point) * scale``, with the block of each element along ``axis`` in ``order``."""
    builder, dtype = integers.builder, scales.dtype
    values = builder.cast(integers, dtype)
    if zeros is not None:
        values = values - builder.op("Gather", builder.cast(zeros, dtype), order, axis=axis)
    elif default:
        values = values - default
    return values * builder.op("Gather", scales, order, axis=axis)


def _in_bytes(integers: Tensor) -> Tensor:
    """Cast 4-bit integers, which the standard's Gather does not accept."""
    wider = {ir.DataType.INT4: ir.DataType.INT8, ir.DataType.UINT4: ir.DataType.UINT8}.get(integers.dtype)
    return integers if wider is None else integers.builder.cast(integers, wider)


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Unpack bytes along the last axis, lowest bits first."""
    if bits == 8:
        return x
    builder, rank = x.builder, x.rank or 0
    shifts = builder.constant(np.arange(0, 8, bits, dtype=np.uint8))
    apart = builder.op("BitShift", builder.op("Unsqueeze", x, builder.integers([-1])), shifts, direction="RIGHT")
    numbers = builder.op("BitwiseAnd", apart, builder.constant(np.array(2**bits - 1, np.uint8)))
    return builder.op("Reshape", numbers, builder.integers([0] * (rank - 1) + [-1]))


def _zero_points(zeros: Tensor | None, rows: int, bits: int) -> Tensor | None:
    """Return zero points ``[rows, blocks]`` or with more columns: numbers, or packed like the weights."""
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
"""Numbers of bitsandbytes' FP4, without the negative half, and NF4 (Dettmers et al. 2023, appendix E)."""


@rewrites("MatMulBnb4")
def matmul_of_four_bit_floats(op: Operation) -> Results:
    """Emit ``A Wᵀ`` for a matrix in bitsandbytes' four bits, with blocks that run across rows."""
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
