"""Forms of normalization layers in files: group normalization of older opsets, and layers written as batch normalization.

GroupNormalization of opset 18 to 20 has a scale and bias per group. Opset 21 has them per channel and deprecated the old version
retroactively, so the checker of ONNX refuses such files.

PyTorch's exporters write instance normalization as batch normalization of one sample in training mode. They reshape [N, C, ...]
to [1, N * C, ...], normalize each channel over the batch, and reshape back, with scale and bias repeated for each sample. As
batch normalization it would average the statistics of different samples, and normalize over the batch once that is opened.

A layer without running statistics (``track_running_stats=False``) is written with statistics computed from its own input. In
training mode they only affect the running outputs, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Builder, Tensor, attribute_value, constant_array, describe_node, replace_node
from burnish.graph.constants import add_initializer, remove_unread_value
from burnish.graph.names import Names
from burnish.graph.protos import graphs_within
from burnish.graph.uses import ancestors_of, is_used, only_user, producer_of, remove_unread

OPSETS = range(18, 21)
EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""

_ATTRIBUTES = {"epsilon": onnx.AttributeProto.FLOAT, "num_groups": onnx.AttributeProto.INT}


def hide_deprecated_nodes(proto: onnx.ModelProto) -> None:
    """Disguise, in place, old group normalization as instance normalization for the checker of ONNX.

    Both have the same inputs and outputs; the attributes are checked here. For a temporary copy.

    Raises:
        ModelError: such a node has invalid attributes or inputs.
    """
    if _opset(proto.opset_import) not in OPSETS:
        return
    functions = (function for function in proto.functions if _opset(function.opset_import) in OPSETS)
    for node in (node for graph in graphs_within(proto.graph, *functions) for node in graph.node):
        if node.op_type == "GroupNormalization" and node.domain == "":
            _hide(node)


def _opset(imports: Iterable[onnx.OperatorSetIdProto]) -> int | None:
    return next((imported.version for imported in imports if imported.domain == ""), None)


def _hide(node: onnx.NodeProto) -> None:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    fits = all(attribute.type == _ATTRIBUTES.get(name) for name, attribute in attributes.items())
    if not fits or "num_groups" not in attributes or len(node.input) != 3 or len(node.output) != 1:
        raise ModelError(
            f"GroupNormalization node '{node.name}' does not have the form of opset 18 to 20: the inputs X, scale and bias, "
            "one output, the integer attribute num_groups, and epsilon where wanted. Export the model again"
        )
    node.op_type = "InstanceNormalization"
    node.attribute.remove(attributes["num_groups"])


def expand_group_normalization(model: ir.Model) -> bool:
    """Replace, in place, group normalization with a scale per group by a normalization of groups and an affine part.

    LayerNormalization over [N, groups, -1] is most precise on runtimes, and supports every floating-point dtype. Scale and bias
    keep their names and one number per group; the graph repeats them for the channels.

    Returns:
        True if there were any.

    Raises:
        ModelError: the groups do not divide the channels, or a scale or bias does not have one number per group.
    """
    if model.opset_imports[""] not in OPSETS:
        return False
    expanded = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type == "GroupNormalization" and node.domain == "":
                _expand(graph, node)
                expanded = True
    return expanded


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    builder = Builder(graph, before=node)
    x, scale, bias = (builder.tensor(value) for value in node.inputs if value is not None)
    if x.value.dtype is None:
        raise ModelError(
            f"{describe_node(node)}: the dtype of its input '{x.name}' is not known: declare it in the model's value_info"
        )
    groups, epsilon = attribute_value(node, "num_groups", 1), attribute_value(node, "epsilon", EPSILON)
    channels = x.dimension(1) if (x.rank or 0) > 1 else None
    _check(node, x, (scale, bias), groups, channels)
    grouped = builder.op("Reshape", x, builder.integers([0, groups, -1]))
    ones = builder.op("Expand", builder.constant(np.ones(1, x.dtype.numpy())), builder.op("Shape", grouped, start=2))
    normalized = builder.op("LayerNormalization", grouped, ones, axis=-1, epsilon=epsilon, like=grouped)
    shape = builder.op("Shape", x)
    if channels is None:
        scale, bias = (builder.op("Reshape", vector, builder.integers([-1, 1])) for vector in (scale, bias))
        replace_node(node, builder.op("Reshape", normalized * scale + bias, shape, like=x))
        return
    # After the groups, like exporters, so that the layer is recognized.
    scale, bias = (_per_channel(vector, x, channels // groups) for vector in (scale, bias))
    replace_node(node, builder.op("Reshape", normalized, shape, like=x) * scale + bias)


def _per_channel(vector: Tensor, x: Tensor, repeats: int) -> Tensor:
    """Repeat each group's number for its channels: [groups] to [C, 1, ...]."""
    builder = vector.builder
    column = builder.op("Reshape", vector, builder.integers([-1, 1]))
    repeated = builder.op("Expand", column, builder.integers([1, repeats]))
    return builder.op("Reshape", repeated, builder.integers([-1] + [1] * ((x.rank or 0) - 2)))


def _check(node: ir.Node, x: Tensor, operands: tuple[Tensor, Tensor], groups: int, channels: int | None) -> None:
    if groups < 1 or (channels is not None and channels % groups):
        raise ModelError(
            f"{describe_node(node)}: num_groups = {groups} does not divide the {channels} channels of its input '{x.name}'; "
            "choose a divisor"
        )
    for operand in operands:
        if operand.shape is not None and (operand.rank != 1 or operand.dimension(0) not in (None, groups)):
            raise ModelError(
                f"{describe_node(node)}: '{operand.name}' has the shape {operand.shape}, and GroupNormalization of opset 18 to "
                f"20 takes one number for each of its {groups} groups; correct it, or export the model with opset 21, where "
                "scale and bias are those of the channels"
            )


def restore_instance_normalization(model: ir.Model) -> bool:
    """Restore InstanceNormalization, in place, from batch normalization of the separated channels of each sample.

    Returns:
        True if there were any.
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
    if x is None or x.dtype == ir.DataType.DOUBLE:  # runtimes have no such kernel for float64
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
    """True if a reshape turned [N, C, ...] into [1, N * C, ...]; the second axis follows from the others."""
    if x.shape is None or taken.shape is None or len(x.shape) != len(taken.shape) or len(x.shape) < 3:
        return False
    return taken.shape.dims[0] == 1 and list(taken.shape.dims[2:]) == list(x.shape.dims[2:])


def _has_shape_of(result: ir.Value, x: ir.Value) -> bool:
    """True if a reshape restored the shape of ``x``; all axes but the first suffice."""
    if x.shape is None or result.shape is None or len(x.shape) != len(result.shape):
        return False
    return list(result.shape.dims[1:]) == list(x.shape.dims[1:])


def _of_one_sample(main: ir.Graph, graph: ir.Graph, node: ir.Node, index: int, channels: int) -> ir.Value | None:
    """Return a scale or bias before it was repeated for each sample; None if samples differ or it is unknown."""
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
        # It keeps its name but holds one sample's numbers.
        operand.const_value = ir.Tensor(np.ascontiguousarray(rows[0]), name=name)
        operand.shape = ir.Shape([channels])
        return operand
    return add_initializer(main, Names.of(main).take(f"{name}_of_sample"), np.ascontiguousarray(rows[0]))


def normalize_by_own_statistics(model: ir.Model) -> bool:
    """Make layers without running statistics use the batch mean and variance in inference mode, in place.

    PyTorch's newer exporter writes them like this.
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
