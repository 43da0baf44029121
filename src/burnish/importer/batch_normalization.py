"""Batch normalization in training mode by which PyTorch's exporters write other layers.

Instance normalization is written as batch normalization of a single sample. They reshape [N, C, ...] to [1, N * C, ...],
normalize each of these channels by the batch, and reshape back; scale and bias are those of the layer, repeated for each sample.
Read as batch normalization, it would average statistics of other samples, and turn into normalization over the batch when that
is opened.

A layer without running statistics (``track_running_stats=False``) is written with operands for them that are computed of its own
input. In training mode these enter only the running outputs, which nothing reads: the layer normalizes by the batch and keeps
nothing.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_node
from burnish.graph.constants import add_initializer, remove_unread_value
from burnish.graph.names import Names
from burnish.graph.uses import ancestors_of, is_used, only_user, producer_of, remove_unread


def restore_instance_normalization(model: ir.Model) -> bool:
    """Put InstanceNormalization, in place, where batch normalization by the batch takes the channels of each sample apart.

    Returns:
        Whether there was any.
    """
    restored = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type == "BatchNormalization" and node.domain == "" and attribute_value(node, "training_mode", 0):
                restored |= _restored(model.graph, graph, node)
    return restored


def _restored(main: ir.Graph, graph: ir.Graph, node: ir.Node) -> bool:
    apart, back = producer_of(node.inputs[0], "Reshape"), only_user(node.outputs[0], "Reshape")
    if apart is None or back is None or back.inputs[0] is not node.outputs[0] or any(map(is_used, node.outputs[1:])):
        return False
    x, taken, result = apart.inputs[0], node.inputs[0], back.outputs[0]
    if x is None or x.dtype == ir.DataType.DOUBLE:  # for which runtimes have no such kernel
        return False
    if taken is None or not _is_taken_apart(x, taken) or not _has_shape_of(result, x):
        return False
    assert x.shape is not None
    channels = x.shape.dims[1]
    vectors = [_of_one_sample(main, graph, node, index, channels) for index in (1, 2)] if isinstance(channels, int) else []
    if not vectors or any(vector is None for vector in vectors):
        return False
    builder = Builder(graph, before=back)
    given, scale, bias = (builder.tensor(value) for value in (x, *vectors) if value is not None)
    epsilon = float(attribute_value(node, "epsilon", 1e-5))
    replace_node(back, builder.op("InstanceNormalization", given, scale, bias, epsilon=epsilon, like=given))
    read = [value for value in node.inputs if value is not None]
    remove_unread_value(main, node.outputs[0])
    for value in read:
        sources = [] if (producer := value.producer()) is None else [each for each in producer.inputs if each is not None]
        for unread in (value, *sources):
            remove_unread_value(main, unread)
    return True


def _is_taken_apart(x: ir.Value, taken: ir.Value) -> bool:
    """Whether a reshape of [N, C, ...] gave [1, N * C, ...]: the elements leave nothing else for the second axis."""
    if x.shape is None or taken.shape is None or len(x.shape) != len(taken.shape) or len(x.shape) < 3:
        return False
    return taken.shape.dims[0] == 1 and list(taken.shape.dims[2:]) == list(x.shape.dims[2:])


def _has_shape_of(result: ir.Value, x: ir.Value) -> bool:
    """Whether a reshape gave the shape of ``x`` back: all axes but the first tell."""
    if x.shape is None or result.shape is None or len(x.shape) != len(result.shape):
        return False
    return list(result.shape.dims[1:]) == list(x.shape.dims[1:])


def _of_one_sample(main: ir.Graph, graph: ir.Graph, node: ir.Node, index: int, channels: int) -> ir.Value | None:
    """The scale or bias that a node has repeated for each sample; None where samples differ, or that cannot be told."""
    operand = node.inputs[index]
    repeated = producer_of(operand, "Tile")
    if repeated is not None:
        vector = repeated.inputs[0]
        return vector if vector is not None and vector.shape is not None and list(vector.shape.dims) == [channels] else None
    array = None if operand is None else constant_array(operand)
    if operand is None or array is None or array.ndim != 1 or array.size % channels:
        return None
    rows = array.reshape(-1, channels)
    if (rows != rows[0]).any():
        return None
    if not operand.is_initializer():
        return Builder(graph, before=node).constant(np.ascontiguousarray(rows[0])).value
    if len(rows) == 1:
        return operand
    name = operand.name or "weight"
    if len(operand.uses()) == 1:
        # It keeps its name, with the numbers of one sample.
        operand.const_value = ir.Tensor(np.ascontiguousarray(rows[0]), name=name)
        operand.shape = ir.Shape([channels])
        return operand
    return add_initializer(main, Names.of(main).take(f"{name}_of_sample"), np.ascontiguousarray(rows[0]))


def normalize_by_own_statistics(model: ir.Model) -> bool:
    """Give such layers, in place, the mean and variance of the batch, in inference mode, as PyTorch's newer exporter writes them.

    Returns:
        Whether there was any.
    """
    found = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type != "BatchNormalization" or node.domain != "" or not attribute_value(node, "training_mode", 0):
                continue
            x, running = node.inputs[0], [value for value in node.inputs[3:5] if value is not None]
            if x is None or x.shape is None or any(map(is_used, node.outputs[1:])):
                continue
            if not any(x in ancestors_of(value) for value in running):
                continue
            builder = Builder(graph, before=node)
            data = builder.tensor(x)
            axes = builder.integers([axis for axis in range(len(x.shape)) if axis != 1])
            centred = data - builder.op("ReduceMean", data, axes)
            mean = builder.op("ReduceMean", data, axes, keepdims=0)
            variance = builder.op("ReduceMean", centred * centred, axes, keepdims=0)
            node.replace_input_with(3, mean.value)
            node.replace_input_with(4, variance.value)
            node.attributes.pop("training_mode")
            node.resize_outputs(1)
            remove_unread(graph, *(value.producer() for value in running))
            found = True
    return found
