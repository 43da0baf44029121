"""Quantization-aware training for models from ``burnish.surgery.quantize``: learned scales or observed ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, describe_node, static_shape
from burnish.operators.collectives import all_reduce
from burnish.operators.quantization import SCALED_GRADIENT, STRAIGHT_THROUGH
from burnish.quantization.graph import QuantizationMark, learns_scale, observed_range


def train_quantization(
    graph: ir.Graph, step: Callable[[], ir.Value], steps_per_epoch: int | None = None
) -> dict[ir.Value, ir.Value]:
    """Make a training graph learn quantization scales or observe ranges, in place.

    Args:
        graph: graph of a canonical model, before its quantization is simulated.
        step: returns the step counter, an int64 scalar; called only if observed ranges freeze.
        steps_per_epoch: steps per epoch of the training, if known.

    Returns:
        The next value of each range that a step updates.

    Raises:
        ConfigurationError: ranges freeze after epochs, but the steps per epoch are unknown.
    """
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
            updated[held] = _observe(graph, node, _in_steps(mark, steps_per_epoch, node), held, step)
    if updated:
        graph.sort()
    return updated


def _scale_gradient(graph: ir.Graph, node: ir.Node, mark: QuantizationMark, scale: ir.Value) -> ir.Value:
    """Divide the gradient of a scale by sqrt(N * levels), with N numbers per scale (Esser et al. 2020, section 2.2).

    N counts the weights that share the scale, or the features of one sample's activation. The gradient passes the bounds of the
    scale, so that it can return after a large step.
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


def _in_steps(mark: QuantizationMark, steps_per_epoch: int | None, node: ir.Node) -> QuantizationMark:
    if mark.freeze_epochs is None:
        return mark
    if steps_per_epoch is None:
        raise ConfigurationError(
            f"The range of {describe_node(node)} stays after {mark.freeze_epochs} epochs, and how many steps an epoch has is not "
            "known: compile(..., steps_per_epoch=...) says it, as burnish train and burnish finetune do"
        )
    return replace(mark, freeze_after=mark.freeze_epochs * steps_per_epoch)


def _observe(graph: ir.Graph, node: ir.Node, mark: QuantizationMark, held: ir.Value, step: Callable[[], ir.Value]) -> ir.Value:
    """Emit the next range and quantize this step with it, so that no number is clipped before it is observed.

    A range counts as a constant, so nodes that compute scale and zero point from it may be before the update.
    """
    readers = tuple(held.uses())
    builder = Builder(graph, before=node)
    x, before = builder.tensor(node.inputs[0]), builder.tensor(held)  # type: ignore[arg-type]
    if mark.settled is not None:
        following = _until_settled(builder, x, node, mark, before)
    else:
        following = _range_of(builder, x, node, mark, before)
    if mark.freeze_after is not None:
        observes = builder.op("Less", builder.tensor(step()), mark.freeze_after)
        following = builder.op("Where", observes, following, before)
    following = STRAIGHT_THROUGH(builder.scalar(0.0, following), following)
    for reader, index in readers:
        reader.replace_input_with(index, following.value)
    return following.value


def _until_settled(builder: Builder, x: Tensor, node: ir.Node, mark: QuantizationMark, before: Tensor) -> Tensor:
    """Emit the next range of an activation. It freezes once neither end moved by more than a fraction of its width in a window.

    The state is low, high, both at the start of the window, and the steps since, or -1 once frozen.
    """
    assert mark.settled is not None
    parts = [builder.op("Slice", before, *(builder.integers([end]) for end in ends)) for ends in ((0, 2), (2, 4), (4, 5))]
    ends, reference, steps = parts
    moved = _range_of(builder, x, node, mark, ends)
    count = steps + 1.0
    is_due = builder.op("GreaterOrEqual", count, float(mark.window))
    width = builder.op("ReduceMax", moved, keepdims=1) - builder.op("ReduceMin", moved, keepdims=1)
    drift = builder.op("ReduceMax", builder.op("Abs", moved - reference), keepdims=1)
    has_settled = builder.op("And", is_due, builder.op("LessOrEqual", drift, width * mark.settled))
    zero, stays = builder.constant(np.zeros(1, np.float32)), builder.constant(np.full(1, -1, np.float32))
    zero, stays = builder.cast(zero, before.dtype), builder.cast(stays, before.dtype)
    begun = builder.op("Where", has_settled, stays, builder.op("Where", is_due, zero, count, like=count), like=count)
    seen = builder.op("Concat", moved, builder.op("Where", is_due, moved, reference, like=moved), begun, axis=0)
    return builder.op("Where", builder.op("Less", steps, 0.0), before, seen, like=before)


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
    # Average over the workers that have samples; a single worker multiplies and divides by one.
    present = builder.op("Reshape", builder.cast(builder.op("Min", builder.op("Size", x), 1), x.dtype), shape)
    total, workers = all_reduce((seen * present, present), "moments")
    return before * mark.momentum + total / builder.op("Max", workers, 1.0) * (1 - mark.momentum)
