"""Export of a model from ``burnish.surgery.quantize`` as QDQ, with integer weights, scales and biases.

A weight becomes an INT8 or INT4 initializer with a DequantizeLinear. Batch normalization is folded into the scales, the signs of
the integers and the bias (Jacob et al. 2018, section 3.2), which only affects the last digits: a positive factor of a channel
becomes a factor of its scale. A bias becomes INT32 with the scale of the product, as ONNX Runtime's integer operators add it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from burnish.errors import CheckpointError
from burnish.graph import (
    Builder,
    Names,
    add_initializer,
    attribute_value,
    constant_array,
    describe_node,
    remove_node,
    replace_value,
    static_shape,
)
from burnish.graph.constants import evaluated
from burnish.graph.uses import is_read_once, is_used, producer_of, remove_unused
from burnish.graph.versions import raise_opset
from burnish.quantization.graph import QuantizationMark
from burnish.rewriting.integer_operators import LARGEST_BIAS, ROOM, is_vector

OPSET_OF_INT4 = 21


def fold_quantization(model: ir.Model, fold_norm: bool = True) -> bool:
    """Compute the integers of quantized weights and biases, in place; models without marks stay.

    Args:
        model: an inference model whose weights are initializers.
        fold_norm: True to fold batch normalization into the layers before it.

    Raises:
        CheckpointError: the weights have 4 bits, which need opset 21, but an operator has another meaning there.
    """
    graph = model.graph
    marked = [(node, mark) for node in graph if (mark := QuantizationMark.of(node)) and node.op_type == "QuantizeLinear"]
    if not marked:
        return False
    if any(mark.bits == 4 for _, mark in marked) and not raise_opset(model.graph, OPSET_OF_INT4):
        raise CheckpointError(
            f"The export has weights of 4 bits, which need opset {OPSET_OF_INT4}, and an operator of the model has "
            "another meaning there: export the model with a newer opset before it is quantized, or quantize to 'int8'"
        )
    names, constants = Names.of(graph), _Constants(model.opset_imports[""])
    trained = {value for node, _ in marked for value in _leaves(node.inputs[1]) if value.is_initializer()}
    folding = _Folding(graph, names, constants, trained)
    for node, mark in marked:
        if mark.role == "activation":
            folding.settle_activation(node)
    for node, mark in marked:
        if mark.role == "weight":
            folding.fold_weight(node, mark, fold_norm)
    for layer in list(graph):
        folding.fold_bias(layer)
    remove_unused(model)
    return True


@dataclass
class _Constants:
    opset: int

    def __post_init__(self) -> None:
        self._computed: dict[ir.Value, np.ndarray] = {}

    def of(self, value: ir.Value | None) -> np.ndarray:
        """Return the array of a value.

        Raises:
            CheckpointError: it does not depend only on constants.
        """
        array = constant_array(value)
        if array is not None:
            return array
        node = None if value is None else value.producer()
        if value is None or node is None:
            raise CheckpointError(
                f"'{None if value is None else value.name}', from which the scale of a quantization is computed, is an input "
                "of the model: make it an initializer"
            )
        if value not in self._computed:
            operands = {operand.name or "": self.of(operand) for operand in node.inputs if operand is not None}
            results = evaluated(node, operands, self.opset)
            if not results:
                raise CheckpointError(f"The scale of a quantization cannot be computed by {describe_node(node)}")
            self._computed.update(zip(node.outputs, results, strict=True))
        return self._computed[value]


@dataclass(frozen=True)
class _Folding:
    graph: ir.Graph
    names: Names
    constants: _Constants
    trained: set[ir.Value]
    biases: dict[ir.Node, np.ndarray] = field(default_factory=dict)

    def settle_activation(self, node: ir.Node) -> None:
        scale, zero_point = (self.constants.of(value) for value in node.inputs[1:3])
        x = node.inputs[0]
        assert x is not None
        stem = (x.name or "activation").partition(":unquantized")[0]
        values = [
            self._add(f"{stem}_scale", np.asarray(scale.astype(np.float32).reshape(()))),
            self._add(f"{stem}_zero_point", np.asarray(zero_point.reshape(()))),
        ]
        for owner in (node, *(reader for reader, _ in tuple(node.outputs[0].uses()))):
            for index, value in enumerate(values, start=1):
                owner.replace_input_with(index, value)
            owner.metadata_props.clear()
            owner.attributes.pop("axis", None)

    def fold_weight(self, node: ir.Node, mark: QuantizationMark, fold_norm: bool) -> None:
        weight = node.inputs[0]
        scale, axis = self.constants.of(node.inputs[1]), attribute_value(node, "axis", 1)
        numbers = self.constants.of(weight)
        placed = scale.reshape([-1 if index == axis else 1 for index in range(numbers.ndim)]) if scale.size > 1 else scale
        integers = np.clip(np.rint(numbers / placed), -mark.levels, mark.levels).astype(np.int8)
        clip = next(iter(node.outputs[0].uses()))[0]
        last = next(iter(clip.outputs[0].uses()))[0]
        if mark.block:
            last, integers, scale, axis = _out_of_blocks(last, integers, scale, mark)
        stem = _stem(node)
        layers = [reader for reader, _ in last.outputs[0].uses()]
        if fold_norm and len(layers) == 1:
            integers, scale = self._fold_normalization(layers[0], integers, scale, axis, mark)
        scale = scale.astype(np.float32)
        if len(layers) == 1 and not mark.block:
            integers, scale = self._with_room(layers[0], integers, scale, axis)
        self._put(last, stem, integers, scale, axis, mark, layers)

    def _with_room(self, layer: ir.Node, integers: np.ndarray, scale: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Enlarge scales so that the integers of the bias leave room for the sum.

        In a dead channel the weights are tiny next to the bias, and few integers remain.
        """
        x, bias = self._of_bias(layer)
        if x is None or bias is None:
            return integers, scale
        needed = (np.abs(bias.reshape(-1)) / (x.astype(np.float64) * ROOM)).astype(np.float32)
        roomy = np.maximum(scale, needed if scale.size > 1 else needed.max()).astype(np.float32)
        ratio = scale / roomy
        placed = ratio.reshape([-1 if index == axis else 1 for index in range(integers.ndim)]) if ratio.size > 1 else ratio
        return np.rint(integers.astype(np.float32) * placed).astype(np.int8), roomy

    def _of_bias(self, layer: ir.Node) -> tuple[np.ndarray | None, np.ndarray | None]:
        x = producer_of(layer.inputs[0], "DequantizeLinear") if _takes_integers(layer) else None
        bias = layer.inputs[2] if x is not None and len(layer.inputs) > 2 else None
        if x is None or bias is None:
            return None, None
        numbers = self.biases[layer] if layer in self.biases else np.asarray(self.constants.of(bias), np.float64)
        return self.constants.of(x.inputs[1]), numbers if is_vector(numbers.shape) else None

    def _put(
        self,
        last: ir.Node,
        stem: str,
        integers: np.ndarray,
        scale: np.ndarray,
        axis: int,
        mark: QuantizationMark,
        layers: Sequence[ir.Node],
    ) -> None:
        held = ir.DataType.INT4 if mark.bits == 4 else ir.DataType.INT8
        # Integer operators take 8 bits: 4-bit weights are cast once when the file is loaded.
        is_widened = held == ir.DataType.INT4 and not mark.block and all(_reads_integers(layer) for layer in layers)
        dtype = ir.DataType.INT8 if is_widened else held
        is_single = scale.size == 1
        scale = scale.reshape(()) if is_single else scale
        builder = Builder(self.graph, before=last)
        numbers = builder.tensor(self._add(f"{stem}_quantized", _integers(integers, held)))
        result = builder.op(
            "DequantizeLinear",
            builder.op("Cast", numbers, to=int(dtype)) if is_widened else numbers,
            builder.tensor(self._add(f"{stem}_scale", scale)),
            builder.tensor(self._add(f"{stem}_zero_point", _integers(np.zeros(scale.shape, np.int8), dtype))),
            like=builder.tensor(last.outputs[0]),
            axis=None if is_single else axis,
            block_size=mark.block or None,
        )
        replace_value(last.outputs[0], result.value)

    def _fold_normalization(
        self, layer: ir.Node, integers: np.ndarray, scale: np.ndarray, axis: int, mark: QuantizationMark
    ) -> tuple[np.ndarray, np.ndarray]:
        output = layer.outputs[0]
        normalization = next((reader for reader, _ in output.uses()), None)
        if normalization is None or not is_read_once(output) or not _is_normalization(normalization, output):
            return integers, scale
        if layer.op_type not in ("Conv", "ConvTranspose", "Gemm"):
            return integers, scale
        operands = [constant_array(value) for value in normalization.inputs[1:5]]
        bias = self.constants.of(layer.inputs[2]) if len(layer.inputs) > 2 and layer.inputs[2] is not None else 0.0
        if any(array is None for array in operands):
            return integers, scale
        gain, shift, mean, variance = (np.asarray(array, np.float64) for array in operands)
        factor = gain / np.sqrt(variance + float(attribute_value(normalization, "epsilon", 1e-5)))
        beta = attribute_value(layer, "beta", 1.0) if layer.op_type == "Gemm" else 1.0
        self._give_bias(layer, shift + (np.asarray(bias, np.float64) * beta - mean) * factor)
        layer.attributes.pop("beta", None)
        replace_value(normalization.outputs[0], output)
        remove_node(normalization)
        # For a matrix in blocks, ``axis`` is the input axis; its scales have both axes.
        along = 1 - axis if mark.block else axis
        by_channel = factor.reshape([-1 if index == along else 1 for index in range(integers.ndim)])
        size = np.abs(by_channel if mark.block else factor)
        return (integers * np.sign(by_channel)).astype(np.int8), scale * np.where(size == 0, 1.0, size)

    def _give_bias(self, layer: ir.Node, numbers: np.ndarray) -> None:
        self.biases[layer] = numbers
        given = layer.inputs[2] if len(layer.inputs) > 2 else None
        weight = layer.inputs[1]
        stem = "layer" if weight is None or (producer := weight.producer()) is None else _stem(producer)
        name = (given.name if given is not None else None) or f"{stem.removesuffix('.weight').removesuffix('_weight')}.bias"
        layer.resize_inputs(max(3, len(layer.inputs)))
        layer.replace_input_with(2, None)  # frees the bias's name if only this layer read it
        layer.replace_input_with(2, self._add(name, numbers.astype(np.float32)))

    def fold_bias(self, layer: ir.Node) -> None:
        x, numbers = self._of_bias(layer)
        weight = producer_of(layer.inputs[1], "DequantizeLinear") if numbers is not None else None
        if x is None or numbers is None or weight is None or "block_size" in weight.attributes:
            return
        of_weight, bias = self.constants.of(weight.inputs[1]), layer.inputs[2]
        scale = x * of_weight
        integers = np.rint(numbers.reshape(-1) / (x.astype(np.float64) * of_weight.astype(np.float64)))
        if bias is None or not (np.abs(integers) < LARGEST_BIAS).all():
            return
        name = bias.name or "bias"
        operands = (
            self._add(f"{name}_quantized", integers.astype(np.int32)),
            self._add(f"{name}_scale", np.asarray(scale)),
            self._add(f"{name}_zero_point", np.zeros(scale.shape, np.int32)),
        )
        builder = Builder(self.graph, before=layer)
        tensors = [builder.tensor(value) for value in operands]
        axis = 0 if scale.size > 1 else None
        layer.replace_input_with(2, builder.op("DequantizeLinear", *tensors, axis=axis, shape=integers.shape).value)

    def _add(self, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
        """Add an initializer; it takes the name of a trained one that will not be read."""
        present = self.graph.initializers.get(name)
        if present is not None and (present in self.trained or not is_used(present)):
            self.graph.initializers.pop(name)
            present.name = self.names.take(f"{name}:trained")
            self.graph.register_initializer(present)
            self.names.release(name)
        return add_initializer(self.graph, self.names.take(name), array)


def _leaves(value: ir.Value | None) -> Iterator[ir.Value]:
    pending = [value]
    while pending:
        value = pending.pop()
        if value is not None:
            producer = value.producer()
            if producer is None:
                yield value
            else:
                pending.extend(producer.inputs)


def _takes_integers(layer: ir.Node) -> bool:
    """True if ONNX Runtime computes a layer with integers, given integer operands; a Conv only if its result is quantized."""
    value = layer.outputs[0]
    if layer.op_type != "Conv" or layer.domain != "":
        return layer.op_type == "Gemm" and layer.domain == ""
    while is_read_once(value):
        reader = next(iter(value.uses()))[0]
        if reader.op_type not in ("Clip", "Relu"):
            return reader.op_type == "QuantizeLinear"
        value = reader.outputs[0]
    return False


def _out_of_blocks(
    last: ir.Node, integers: np.ndarray, scale: np.ndarray, mark: QuantizationMark
) -> tuple[ir.Node, np.ndarray, np.ndarray, int]:
    """Return the last node that restores a matrix from blocks, the matrix, its scales, and the block axis."""
    last = next(iter(last.outputs[0].uses()))[0]
    shape = static_shape(last.outputs[0])
    assert shape is not None
    integers = integers.reshape(shape)
    scale = scale.reshape(shape[0], shape[1] // mark.block)
    if mark.input_axis == 1:
        return last, integers, scale, 1
    return next(iter(last.outputs[0].uses()))[0], integers.T, scale.T, 0


def _stem(node: ir.Node) -> str:
    value = node.inputs[0]
    while value is not None and (producer := value.producer()) is not None:
        value = producer.inputs[0]
    return "weight" if value is None or value.name is None else value.name


def _reads_integers(layer: ir.Node) -> bool:
    return producer_of(layer.inputs[0], "DequantizeLinear") is not None


def _is_normalization(node: ir.Node, output: ir.Value) -> bool:
    if node.op_type != "BatchNormalization" or node.domain != "" or node.inputs[0] is not output:
        return False
    return not any(map(is_used, node.outputs[1:])) and attribute_value(node, "training_mode", 0) == 0


def _integers(array: np.ndarray, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.Tensor(np.ascontiguousarray(array).reshape(array.shape).astype(dtype.numpy()), dtype)
