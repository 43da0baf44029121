"""What training does to the scales of a model that ``burnish.surgery.quantize`` made: it learns them, or observes ranges."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from burnish.graph import Builder, Tensor, static_shape
from burnish.graph.quantization_mark import QuantizationMark, learns_scale, observed_range
from burnish.graph.rounded_bias import unround
from burnish.ops.collectives import all_reduce
from burnish.ops.quantization import SCALED_GRADIENT, STRAIGHT_THROUGH


def train_quantization(graph: ir.Graph, step: Callable[[], ir.Value]) -> dict[ir.Value, ir.Value]:
    """Let a training graph learn scales by step sizes, or observe ranges, and add biases as they are, in place.

    Args:
        graph: of a canonical model, before its quantization is simulated.
        step: gives the step counter, an int64 scalar; called where observed ranges freeze.

    Returns:
        For every range that a step updates, its next value.
    """
    unround(graph)
    updated: dict[ir.Value, ir.Value] = {}
    scaled: set[ir.Value] = set()
    for node in list(graph):
        if node.op_type != "QuantizeLinear" or node.domain != "":
            continue
        mark, scale = QuantizationMark.of(node), node.inputs[1]
        if mark is None or scale is None:
            continue
        if learns_scale(node) and scale not in scaled:
            scaled.add(_scale_gradient(graph, node, mark, scale))
        elif (held := observed_range(node)) is not None and held not in updated:
            updated[held] = _observe(graph, node, mark, held, step)
    if updated:
        graph.sort()
    return updated


def _scale_gradient(graph: ir.Graph, node: ir.Node, mark: QuantizationMark, scale: ir.Value) -> ir.Value:
    """Divide the gradient of a scale by sqrt(N * levels), with N numbers to a scale (Esser et al. 2020, section 2.2).

    N counts the weights that share the scale, or the features of an activation of one sample. The bounds of a scale let its
    gradient through: what a large step drove beyond them comes back.
    """
    builder = Builder(graph, before=node)
    x, bounded = builder.tensor(node.inputs[0]), builder.tensor(scale)  # type: ignore[arg-type]
    learned = SCALED_GRADIENT(builder.tensor(_learned(scale)), _factor(builder, x, mark, scale))
    result = STRAIGHT_THROUGH(learned, bounded).value
    for reader, index in tuple(scale.uses()):
        if reader.op_type in ("QuantizeLinear", "DequantizeLinear"):
            reader.replace_input_with(index, result)
    return result


def _learned(scale: ir.Value) -> ir.Value:
    """The scale before its bounds."""
    while (producer := scale.producer()) is not None and producer.op_type in ("Max", "Min") and producer.inputs[0] is not None:
        scale = producer.inputs[0]
    return scale


def _factor(builder: Builder, x: Tensor, mark: QuantizationMark, scale: ir.Value) -> Tensor:
    dims = None if x.shape is None else x.shape.dims
    if mark.role == "weight":
        scales = math.prod(static_shape(scale) or (1,))
        count = math.prod(static_shape(x.value) or (scales,)) // scales
        return builder.scalar(1 / math.sqrt(count * mark.levels), x)
    features = [] if dims is None else [extent for extent in dims[1:] if isinstance(extent, int)]
    if dims is not None and len(features) == len(dims) - 1:
        return builder.scalar(1 / math.sqrt(max(math.prod(features), 1) * mark.levels), x)
    samples = builder.op("Shape", x, start=0, end=1) if x.rank != 0 else builder.integers([1])
    features_of_sample = builder.op("Max", builder.op("Size", x) / builder.op("Max", samples, 1), 1)
    root = builder.op("Sqrt", builder.cast(features_of_sample, x.dtype) * float(mark.levels))
    return builder.op("Reshape", builder.scalar(1.0, x) / root, builder.integers([]))


def _observe(graph: ir.Graph, node: ir.Node, mark: QuantizationMark, held: ir.Value, step: Callable[[], ir.Value]) -> ir.Value:
    """Emit the next range, which the step itself quantizes by: no number of its batch is cut off before it is seen.

    A range counts as a constant. The nodes that compute scale and zero point from it may stand before it then.
    """
    readers = tuple(held.uses())
    builder = Builder(graph, before=node)
    x, before = builder.tensor(node.inputs[0]), builder.tensor(held)  # type: ignore[arg-type]
    following = _range_of(builder, x, node, mark, before)
    if mark.freeze_after is not None:
        observes = builder.op("Less", builder.tensor(step()), mark.freeze_after)
        following = builder.op("Where", observes, following, before)
    following = STRAIGHT_THROUGH(builder.scalar(0.0, following), following)
    for reader, index in readers:
        reader.replace_input_with(index, following.value)
    return following.value


def _range_of(builder: Builder, x: Tensor, node: ir.Node, mark: QuantizationMark, before: Tensor) -> Tensor:
    if mark.role == "weight":
        count = before.dimension(0)
        greatest = builder.op("Abs", x)
        if count == 1:
            greatest = builder.op("Reshape", builder.op("ReduceMax", greatest, keepdims=0), builder.integers([1]))
        else:
            axis = node.attributes["axis"].as_int() % (x.rank or 1)
            axes = builder.integers([index for index in range(x.rank or 1) if index != axis])
            greatest = builder.op("ReduceMax", greatest, axes, keepdims=0)
        return builder.op("Where", builder.op("Equal", greatest, 0.0), before, greatest)
    low = builder.op("Min", builder.op("ReduceMin", x, keepdims=0), 0.0)
    high = builder.op("Max", builder.op("ReduceMax", x, keepdims=0), 0.0)
    shape = builder.integers([1])
    seen = builder.op("Concat", builder.op("Reshape", low, shape), builder.op("Reshape", high, shape), axis=0)
    # The average over the workers that have samples: alone it is multiplied and divided by one.
    present = builder.op("Reshape", builder.cast(builder.op("Min", builder.op("Size", x), 1), x.dtype), shape)
    total, workers = all_reduce((seen * present, present), "moments")
    return before * mark.momentum + total / builder.op("Max", workers, 1.0) * (1 - mark.momentum)
