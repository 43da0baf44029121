"""Inference of a model from ``burnish.surgery.quantize`` with the results of ONNX Runtime's integer operators.

Simulated rounding differs from integer arithmetic for sums halfway between two integers, and deep networks amplify that. So the
operators that ONNX Runtime replaces by integer operators are computed in whole numbers, with the integers of
``fold_quantization``, and rounded as in its kernels; see ``integer_operators``.

Layers, products of activations and Mul are equal on every processor; QLinearAdd and pooling follow x86 with AVX2.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, output_axis, replace_value, static_shape
from burnish.graph.uses import is_read_once, producer_of, remove_unused
from burnish.quantization.graph import QuantizationMark
from burnish.rewriting.integer_operators import (
    GREATEST_ACTIVATION,
    LARGEST_BIAS,
    ROOM,
    Activation,
    Target,
    accumulated,
    added,
    averaged,
    averaged_globally,
    digits,
    is_vector,
    multiplied,
    terms_of,
)

LAYERS = ("Conv", "Gemm", "MatMul")
UNKNOWN_TERMS = 2**13
"""Assumed number of terms of a product of two activations if it is unknown."""


def compute_integers(model: ir.Model, float64: bool = True) -> bool:
    """Make an inference graph compute what its export computes on ONNX Runtime, in place.

    Graphs without quantization marks stay, and so does everything without an integer operator: skipped layers, weights in blocks,
    transposed convolutions. Weights and scales may be inputs.

    Args:
        model: the lowered graph ``predict`` or ``evaluate`` of a program.
        float64: True if the runtime has float64; otherwise values between two roundings are rounded too.
    """
    walk = _Walk(model.graph, ir.DataType.DOUBLE if float64 else ir.DataType.FLOAT)
    for node in list(model.graph):
        mark = QuantizationMark.of(node) if node.op_type == "QuantizeLinear" else None
        if mark is not None and mark.role == "activation":
            walk.visit(node)
    for node in list(model.graph):
        if node.op_type in ("Gemm", "MatMul"):
            walk.visit_unrounded(node)
    if walk.has_changed:
        remove_unused(model)
    return walk.has_changed


@dataclass(frozen=True)
class _Chain:
    """An integer operator with the nodes that it fuses.

    Attributes:
        node: the operator.
        normalization: the BatchNormalization after it.
        low, high: bounds from a Relu or Clip.
    """

    node: ir.Node
    normalization: ir.Node | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class _Layer:
    """A layer in whole numbers; its result is ``integers * scale``.

    Attributes:
        integers: INT32, including the bias.
        scale: float32, one number or one per output channel, in a shape that broadcasts to the result.
    """

    integers: Tensor
    scale: Tensor


@dataclass
class _Walk:
    graph: ir.Graph
    wide: ir.DataType
    has_changed: bool = False

    def visit(self, node: ir.Node) -> None:
        value = node.inputs[0]
        chain = None if value is None else _chain_before(value)
        if chain is None or len(node.inputs) < 3:
            return
        builder = Builder(self.graph, before=node)
        target = Target(_operand(builder, node, 1), _operand(builder, node, 2), chain.low, chain.high)
        self._replace(node.outputs[0], self._integers(builder, chain, target))

    def visit_unrounded(self, node: ir.Node) -> None:
        """Compute a product with an unrounded result from integers, like QGemm and MatMulIntegerToFloat."""
        output = node.outputs[0]
        reader = next(iter(output.uses()))[0] if is_read_once(output) and node.op_type == "Gemm" else None
        normalization = reader if reader is not None and reader.op_type == "BatchNormalization" else None
        builder = Builder(self.graph, before=normalization or node)
        layer = self._layer(builder, _Chain(node, normalization))
        if layer is not None:
            # Via float64, so that no engine fuses the product with a following sum.
            number = builder.cast(builder.cast(layer.integers, ir.DataType.FLOAT), self.wide)
            result = builder.cast(number * builder.cast(layer.scale, self.wide), ir.DataType.FLOAT)
            self._replace((normalization or node).outputs[0], result)

    def _replace(self, output: ir.Value, result: Tensor | None) -> None:
        if result is not None:
            result.value.shape = output.shape
            replace_value(output, result.value)
            self.has_changed = True

    def _integers(self, builder: Builder, chain: _Chain, target: Target) -> Tensor | None:
        node = chain.node
        if node.op_type in LAYERS:
            layer = self._layer(builder, chain)
            if layer is None:
                return None
            return target.integers(builder.cast(layer.integers, ir.DataType.FLOAT) * (layer.scale / target.scale))
        operands = [_activation(builder, value) for value in node.inputs]
        x = operands[0] if operands and chain.normalization is None else None
        if x is None:
            return None
        if node.op_type == "GlobalAveragePool":
            return averaged_globally(x, target, self.wide)
        if node.op_type == "AveragePool":
            return averaged(node, x, target)
        other = operands[1] if len(operands) == 2 else None
        if other is None or node.op_type not in ("Add", "Mul"):
            return None
        compute = added if node.op_type == "Add" else multiplied
        return compute(x, other, target, self.wide)

    def _layer(self, builder: Builder, chain: _Chain) -> _Layer | None:
        node = chain.node
        x, other = (_activation(builder, value) for value in node.inputs[:2])
        weight = _weight(node.inputs[1])
        if x is None or (other is None and weight is None):
            return None
        if weight is None:
            return None if other is None or chain.normalization is not None else _product(node, x, other)
        shape, axis = static_shape(weight.outputs[0]), output_axis(node)
        mark = QuantizationMark.of(weight)
        is_own, is_folded = is_read_once(weight.outputs[0]), chain.normalization is not None
        # Exports fold batch normalization only into weights with a single reader, and not into a MatMul.
        if shape is None or mark is None or (is_folded and (not is_own or node.op_type == "MatMul")):
            return None
        division = digits(mark.levels, terms_of(shape, axis))
        operand = node.inputs[2] if len(node.inputs) > 2 else None
        if division is None or (operand is not None and not is_vector(() if operand.shape is None else operand.shape.dims)):
            return None
        integers = builder.cast(_operand(builder, weight, 0), ir.DataType.FLOAT)
        scale = _flat(_operand(builder, weight, 1))
        bias = builder.cast(_flat(builder.tensor(operand)), self.wide) if operand is not None else None
        if chain.normalization is not None:
            sign, scale, bias = self._folded(builder, chain.normalization, scale, bias)
            integers = integers * _at_axis(sign, axis, len(shape))
        if bias is not None and is_own:
            ratio, scale = self._with_room(x, scale, bias)
            integers = builder.op("Round", integers * _at_axis(ratio, axis, len(shape)))
        total = accumulated(node, x.numbers, integers, division)
        if bias is not None:
            step = builder.cast(x.scale, self.wide) * builder.cast(scale, self.wide)
            whole = builder.op("Round", bias / step)
            bounds = (builder.scalar(bound, whole) for bound in (-LARGEST_BIAS, LARGEST_BIAS))
            total = total + _of_channels(builder.cast(builder.op("Clip", whole, *bounds), ir.DataType.INT32), node)
        return _Layer(total, _of_channels(x.scale * scale, node))

    def _with_room(self, x: Activation, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales that leave room for the sum next to the bias, after the given ones as fractions of them.

        See ``fold_quantization`` for the reason.
        """
        builder = scale.builder
        needed = builder.op("Abs", bias) / (builder.cast(x.scale, self.wide) * float(ROOM))
        if scale.dimension(0) == 1:
            needed = builder.op("ReduceMax", needed, keepdims=1)
        roomy = builder.op("Max", scale, builder.cast(needed, ir.DataType.FLOAT))
        return scale / roomy, roomy

    def _folded(
        self, builder: Builder, normalization: ir.Node, scale: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gain, shift, mean, variance = (builder.cast(_operand(builder, normalization, index), self.wide) for index in range(1, 5))
        epsilon = float(attribute_value(normalization, "epsilon", 1e-5))
        factor = gain / builder.op("Sqrt", variance + epsilon)
        size = builder.op("Where", builder.op("Equal", factor, 0.0), builder.scalar(1.0, factor), builder.op("Abs", factor))
        folded = builder.cast(builder.cast(scale, self.wide) * size, ir.DataType.FLOAT)
        total = shift + ((-mean) if bias is None else bias - mean) * factor
        return builder.cast(builder.op("Sign", factor), ir.DataType.FLOAT), folded, total


def _product(node: ir.Node, x: Activation, other: Activation) -> _Layer | None:
    terms = None if x.integers.shape is None or not x.integers.rank else x.integers.dimension(-1)
    division = None if node.op_type != "MatMul" else digits(GREATEST_ACTIVATION, terms or UNKNOWN_TERMS)
    if division is None:
        return None
    return _Layer(accumulated(node, x.numbers, other.numbers, division), x.scale * other.scale)


def _chain_before(value: ir.Value) -> _Chain | None:
    """Return the operator before a quantization and the nodes between; None if an intermediate result has another reader."""
    low: float | None = None
    high: float | None = None
    normalization: ir.Node | None = None
    while is_read_once(value):
        node = producer_of(value)
        if node is None or not node.inputs or node.inputs[0] is None:
            return None
        is_limit = node.op_type in ("Clip", "Relu")
        if is_limit and low is None and high is None and normalization is None:
            limits = _limits(node)
            if limits is None:
                return None
            low, high = limits
        elif node.op_type == "BatchNormalization" and normalization is None:
            normalization = node
        else:
            return None if is_limit or node.op_type == "BatchNormalization" else _Chain(node, normalization, low, high)
        value = node.inputs[0]
    return None


def _limits(node: ir.Node) -> tuple[float | None, float | None] | None:
    if node.op_type == "Relu":
        return 0.0, None
    limits: list[float | None] = []
    for bound in (*node.inputs[1:3], None, None)[:2]:
        array = None if bound is None else constant_array(bound)
        if bound is not None and (array is None or array.size != 1):
            return None
        limits.append(None if array is None else float(array.reshape(())))
    return limits[0], limits[1]


def _activation(builder: Builder, value: ir.Value | None) -> Activation | None:
    node = _dequantized(value, "activation")
    if node is None or len(node.inputs) < 3:
        return None
    integers, scale, zero_integer = (_operand(builder, node, index) for index in range(3))
    return Activation(scale, zero_integer, integers)


def _weight(value: ir.Value | None) -> ir.Node | None:
    """Return the node that dequantizes a weight; None for a weight in blocks."""
    return _dequantized(value, "weight")


def _dequantized(value: ir.Value | None, role: str) -> ir.Node | None:
    node = producer_of(value, "DequantizeLinear")
    mark = QuantizationMark.of(node)
    return node if mark is not None and mark.role == role and not mark.block else None


def _operand(builder: Builder, node: ir.Node, index: int) -> Tensor:
    value = node.inputs[index]
    assert value is not None
    return builder.tensor(value)


def _flat(numbers: Tensor) -> Tensor:
    return numbers if numbers.rank == 1 else numbers.builder.op("Reshape", numbers, numbers.builder.integers([-1]))


def _at_axis(numbers: Tensor, axis: int, rank: int) -> Tensor:
    places = [-1 if index == axis else 1 for index in range(rank)]
    return numbers.builder.op("Reshape", numbers, numbers.builder.integers(places))


def _of_channels(numbers: Tensor, layer: ir.Node) -> Tensor:
    weight = layer.inputs[1]
    behind = 0 if layer.op_type != "Conv" or weight is None or weight.shape is None else len(weight.shape) - 2
    return numbers.builder.op("Reshape", numbers, numbers.builder.integers([-1] + [1] * behind)) if behind else numbers
