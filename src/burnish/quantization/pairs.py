"""Pairs of QuantizeLinear and DequantizeLinear with trainable scales."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, Tensor, add_initializer, constant_array, describe_node
from burnish.graph.uses import replace_output
from burnish.quantization.calibration import Range, activation_scale, weight_limits
from burnish.quantization.formats import ActivationFormat, WeightFormat
from burnish.quantization.graph import QuantizationMark, Role, Scales
from burnish.quantization.placement import Layer, Place

FLOOR = 0.01
"""Lower bound of a learned scale, relative to its initial value."""


@dataclass(frozen=True)
class Training:
    """Training of scales.

    Attributes:
        scales: ``learned``, ``observed`` or ``fixed``.
        momentum: share of an activation's observed range kept by a step.
        freeze_after: step that freezes observed ranges, or None.
        freeze_epochs: the same in epochs.
        settled: relative movement that freezes a range, or None.
    """

    scales: Scales
    momentum: float
    freeze_after: int | None = None
    freeze_epochs: int | None = None
    settled: float | None = None

    def mark(self, *, is_weight: bool, levels: int) -> QuantizationMark:
        """Return the mark of a quantizer."""
        momentum = 0.0 if is_weight else self.momentum
        role: Role = "weight" if is_weight else "activation"
        return QuantizationMark(
            role,
            self.scales,
            levels,
            momentum=momentum,
            freeze_after=self.freeze_after,
            freeze_epochs=self.freeze_epochs,
            settled=None if is_weight else self.settled,
        )


def quantize_weight(builder: Builder, names: Names, layer: Layer, weights: WeightFormat, training: Training) -> None:
    """Quantize a layer's weight, in place. ``builder`` emits before the layer, in the graph of the weight.

    Raises:
        ConfigurationError: a matrix's inputs cannot be divided into blocks.
    """
    weight = builder.tensor(layer.weight)
    mark = replace(training.mark(is_weight=True, levels=weights.levels), bits=weights.bits)
    axis = layer.axis if weights.per_channel else None
    numbers, blocks = weight, 0
    if weights.block and layer.input_axis is not None:
        blocks = _block_of(layer, weights.block)
        mark = replace(mark, block=blocks, input_axis=layer.input_axis)
        numbers, axis = _in_blocks(weight, layer.input_axis, blocks), 0
    array = constant_array(layer.weight)
    assert array is not None
    if blocks:
        rows = array if layer.input_axis == 1 else array.T
        array = rows.reshape(-1, blocks)
    limits = weight_limits(array, axis, weights)
    scale = _weight_scale(builder, names, layer.weight.name or "weight", limits, mark)
    zero = builder.constant(np.zeros(limits.shape, np.int8))
    along = 0 if axis is None else axis
    integers = builder.op("QuantizeLinear", numbers, scale, zero, axis=along)
    _put_mark(integers, mark)
    bounds = [builder.constant(np.asarray(bound, np.int8)) for bound in (-weights.levels, weights.levels)]
    result = builder.op("DequantizeLinear", builder.op("Clip", integers, *bounds), scale, zero, axis=along, like=numbers)
    _put_mark(result, mark)
    value = (_out_of_blocks(result, weight, layer.input_axis) if blocks else result).value
    value.name = names.take(f"{layer.weight.name}:quantized")  # keeps the layer's name, which derives from its weight's
    layer.node.replace_input_with(1, value)


def _block_of(layer: Layer, block: int) -> int:
    assert layer.input_axis is not None
    inputs = _array(layer.weight).shape[layer.input_axis]
    if inputs % block:
        raise ConfigurationError(
            f"quantize: {describe_node(layer.node)} has {inputs} inputs, which are no whole number of blocks of {block}: "
            "leave the layer out (skip=[...]), or choose smaller blocks or 'int4 per channel'"
        )
    return block


def _in_blocks(weight: Tensor, input_axis: int, block: int) -> Tensor:
    """Return a matrix as rows of one block each, grouped by output."""
    builder = weight.builder
    rows = weight if input_axis == 1 else builder.op("Transpose", weight, perm=[1, 0])
    return builder.op("Reshape", rows, builder.integers([-1, block]))


def _out_of_blocks(rows: Tensor, weight: Tensor, input_axis: int | None) -> Tensor:
    builder, (first, second) = rows.builder, (weight.dimension(0), weight.dimension(1))
    assert first is not None
    assert second is not None
    if input_axis == 1:
        return builder.op("Reshape", rows, builder.integers([first, second]))
    return builder.op("Transpose", builder.op("Reshape", rows, builder.integers([second, first])), perm=[1, 0])


def _weight_scale(builder: Builder, names: Names, name: str, limits: np.ndarray, mark: QuantizationMark) -> Tensor:
    if mark.scales == "observed":
        observed = _initializer(builder, names, f"{name}_range", limits)
        return builder.op("Max", observed / float(mark.levels), _floor(limits / mark.levels))
    return _scale(builder, names, name, limits / mark.levels, mark)


def _scale(
    builder: Builder, names: Names, name: str, array: np.ndarray, mark: QuantizationMark, ceiling: float | None = None
) -> Tensor:
    if mark.scales != "learned":
        return builder.constant(array.astype(np.float32))
    scale = builder.op("Max", _initializer(builder, names, f"{name}_scale", array), _floor(array))
    return scale if ceiling is None else builder.op("Min", scale, ceiling)


def _floor(scale: np.ndarray) -> float:
    return float(scale.min()) * FLOOR


def quantize_activation(
    builder: Builder,
    names: Names,
    place: Place,
    limits: Range,
    activations: ActivationFormat,
    training: Training,
) -> tuple[Tensor, Tensor]:
    """Emit the scale and zero point of an activation.

    Args:
        builder: emits after the activation's node.
        names: names in use in the graph.
        place: the activation.
        limits: its range.
        activations, training: format and training of the quantizer.

    Returns:
        The scale and the zero point, of shape [1].
    """
    name, mark = place.value.name or "activation", training.mark(is_weight=False, levels=activations.levels)
    scale, zero_point = activation_scale(limits, activations)
    dtype = np.dtype(activations.dtype)
    constant = builder.constant(np.asarray([zero_point], dtype))
    if training.scales != "observed":
        ceiling = _ceiling(place, scale, zero_point - activations.lowest)
        return _scale(builder, names, name, np.asarray([scale]), mark, ceiling), constant
    ends = [limits.low, limits.high]
    # To detect settling, also store the range at the start of the window and the steps since.
    held = ends if training.settled is None else [*ends, *ends, 0.0]
    observed = _initializer(builder, names, f"{name}_range", np.asarray(held))
    low, high = (builder.op("Gather", observed, builder.integers([index]), axis=0) for index in (0, 1))
    if activations.symmetric:
        return builder.op("Max", builder.op("Max", high, -low) / float(activations.levels), scale * FLOOR), constant
    step = builder.op("Max", (high - low) / float(activations.levels), scale * FLOOR)
    lowest = float(activations.lowest)
    zero = builder.op("Clip", builder.op("Round", lowest - low / step), *(builder.scalar(lowest + n, low) for n in (0, 255)))
    return step, builder.cast(zero, ir.DataType.from_numpy(dtype))


def _ceiling(place: Place, scale: float, below: int) -> float | None:
    """Return the largest scale whose integers stay within a Clip; beyond it, the Clip could not be removed.

    Args:
        place: the activation.
        scale: the calibrated scale.
        below: integers below its zero point, of 255.

    Returns:
        The scale, rounded down; None without a limit. Limits far inside the calibrated range are ignored: a symmetric range
            extends equally on both sides.
    """
    sides = ((place.high, 255 - below), (None if place.low is None else -place.low, below))
    bounds = [bound / integers for bound, integers in sides if bound is not None and bound > 0 and integers > 0]
    bounds = [bound for bound in bounds if bound > 0.99 * scale]
    return float(np.nextafter(np.float32(min(bounds)), np.float32(0))) if bounds else None


def put_pair(
    place: Place,
    builder: Builder,
    grid: tuple[Tensor, Tensor],
    mark: QuantizationMark,
    names: Names,
    apart: Collection[ir.Node],
) -> None:
    """Make all readers of an activation, except those in ``apart``, read its quantized value.

    A model output keeps its name. ``grid`` is scale and zero point.
    """
    value, (scale, zero_point) = place.value, grid
    readers = [(reader, index) for reader, index in value.uses() if reader not in apart]
    was_output = value.is_graph_output()
    x = builder.tensor(value)
    integers = builder.op("QuantizeLinear", x, scale, zero_point, axis=0)
    _put_mark(integers, mark)
    result = builder.op("DequantizeLinear", integers, scale, zero_point, axis=0, like=x)
    _put_mark(result, mark)
    for reader, index in readers:
        reader.replace_input_with(index, result.value)
    if was_output and value.producer() is not None:
        name = value.name
        replace_output(value, result.value)
        value.name = names.take(f"{name}:unquantized")
        result.value.name = name


def _put_mark(result: Tensor, mark: QuantizationMark) -> None:
    producer = result.value.producer()
    assert producer is not None
    mark.put(producer)


def _initializer(builder: Builder, names: Names, name: str, array: np.ndarray) -> Tensor:
    return builder.tensor(add_initializer(builder.graph, names.take(name), array.astype(np.float32)))


def _array(value: ir.Value) -> np.ndarray:
    array = constant_array(value)
    assert array is not None
    return array
