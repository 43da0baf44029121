"""Secondary outputs that a runtime does not support, computed by other operators.

A runtime may support ``MaxPool`` without ``Indices``, or ``BatchNormalization`` without batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, replace_node, replace_value
from burnish.graph.names import separate_names
from burnish.operators import Operation
from burnish.operators.normalization.batch import inverse_std_of
from burnish.operators.normalization.statistics import channel_affine, channel_mean, per_channel
from burnish.operators.positions import extents
from burnish.operators.windows import Windows


def compute_further_outputs(model: ir.Model, limits: Mapping[str, int]) -> bool:
    """Compute, in place, the outputs that a runtime does not support, for known operators.

    Args:
        model: a model of standard operators.
        limits: operator -> number of supported outputs; others are unlimited.

    Returns:
        True if anything changed. ``check_allowed`` reports nodes that still exceed their limit.
    """
    if not limits:
        return False
    changed = False
    for node in list(model.graph):
        rewrite = _REWRITES.get(node.op_type) if node.domain == "" else None
        given = sum(1 for output in node.outputs if output.name and (output.uses() or output.is_graph_output()))
        if rewrite is not None and given > limits.get(node.op_type, given):
            changed = rewrite(Operation(node, Builder(model.graph, before=node))) or changed
    if changed:
        separate_names(model.graph)
    return changed


def _batch_normalization(op: Operation) -> bool:
    """Compute batch and running statistics by the standard's formulas (BatchNormalization-15)."""
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    mean = channel_mean(x)
    centered = x - per_channel(mean, x)
    variance = channel_mean(centered * centered)
    y = channel_affine(centered, scale * inverse_std_of(variance, op.attribute("epsilon", 1e-5)), bias)
    kept = float(op.attribute("momentum", 0.9))
    running = [mean, variance]
    if kept:
        running = [op.required(3 + index) * kept + value * (1.0 - kept) for index, value in enumerate(running)]
    replace_node(op.node, (y, *running)[: len(op.node.outputs)])
    return True


def _max_pool(op: Operation) -> bool:
    """Compute the index of the first maximum of each window, flat over all of x."""
    x, y = op.required(0), op.output
    windows = Windows.of(op)
    inputs, outputs = extents(x, 2), extents(y, 2)
    if inputs is None or outputs is None or op.attribute("storage_order", 0):
        return False
    places = _images(x, prod(inputs), windows.rank) + _places_in_image(x, windows, inputs, outputs)
    indices = op.node.outputs[1]
    replace_value(indices, places.value)
    op.node.resize_outputs(1)
    return True


def _places_in_image(x: Tensor, windows: Windows, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Tensor:
    builder, rank = x.builder, windows.rank
    reach = [(outputs[axis] - 1) * windows.strides[axis] + windows.span(axis) for axis in range(rank)]
    ends = [max(0, reach[axis] - windows.pads_begin[axis] - inputs[axis]) for axis in range(rank)]
    padded = x
    if any(windows.pads_begin) or any(ends):
        lowest = builder.scalar(float(np.finfo(np.float32).min), x)
        padded = builder.op("Pad", x, builder.integers([0, 0, *windows.pads_begin, 0, 0, *ends]), lowest)
    taps = list(product(*(range(extent) for extent in windows.kernel_shape)))
    axes = builder.integers(list(range(2, 2 + rank)))
    last = builder.integers([-1])
    elements = []
    for tap in taps:
        begin = [tap[axis] * windows.dilations[axis] for axis in range(rank)]
        end = [begin[axis] + (outputs[axis] - 1) * windows.strides[axis] + 1 for axis in range(rank)]
        strides = builder.integers(list(windows.strides))
        element = builder.op("Slice", padded, builder.integers(begin), builder.integers(end), axes, strides)
        elements.append(builder.op("Unsqueeze", element, last))
    largest = builder.op("ArgMax", builder.op("Concat", *elements, axis=-1), axis=-1, keepdims=0)
    sizes = [prod(inputs[axis + 1 :]) for axis in range(rank)]
    corner = np.zeros(outputs, np.int64)
    for axis in range(rank):
        along = (np.arange(outputs[axis]) * windows.strides[axis] - windows.pads_begin[axis]) * sizes[axis]
        corner += along.reshape([-1 if other == axis else 1 for other in range(rank)])
    within = [sum(tap[axis] * windows.dilations[axis] * sizes[axis] for axis in range(rank)) for tap in taps]
    return builder.op("Gather", builder.integers(within), largest, axis=0) + builder.constant(corner)


def _images(x: Tensor, size: int, rank: int) -> Tensor:
    builder = x.builder
    images = builder.op("Shape", x, start=0, end=2)
    count = builder.op("ReduceProd", images, keepdims=0)
    zero, one = builder.constant(np.asarray(0, np.int64)), builder.constant(np.asarray(1, np.int64))
    numbers = builder.op("Range", zero, count, one)
    shape = builder.op("Concat", images, builder.integers([1] * rank), axis=0)
    return builder.op("Reshape", numbers, shape) * builder.constant(np.asarray(size, np.int64))


_REWRITES: Mapping[str, Callable[[Operation], bool]] = {"BatchNormalization": _batch_normalization, "MaxPool": _max_pool}
WITH_FURTHER_OUTPUTS = tuple(_REWRITES)
"""Operators whose secondary outputs can be computed."""
