"""GroupNormalization of opset 18 to 20, which the standard withdrew, in pieces that mean the same and are valid.

It had a scale and a bias for each group. Opset 21 has them for each channel, and deprecated the older version after the
fact, so that the check of ONNX refuses the files that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Builder, Tensor, attribute_value, describe_node, replace_node
from burnish.graph.protos import graphs_within

OPSETS = range(18, 21)
EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""

_ATTRIBUTES = {"epsilon": onnx.AttributeProto.FLOAT, "num_groups": onnx.AttributeProto.INT}


def hide_deprecated_nodes(proto: onnx.ModelProto) -> None:
    """Let, in place, the check of ONNX pass over group normalization by group: its nodes become instance normalization.

    That is of the same inputs and outputs; the attributes are checked here. For a copy that is checked and thrown away.

    Raises:
        ModelError: such a node has other attributes or inputs than the standard gives it.
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
    """Write, in place, group normalization with a scale for each group as a normalization of groups and an affine part.

    LayerNormalization over [N, groups, -1] is what runtimes compute with the most digits, and in every floating-point dtype.
    Scale and bias keep their names and one number for each group; they are repeated for the channels of a group in the graph.

    Returns:
        Whether there was any.

    Raises:
        ModelError: the groups do not divide the channels, or a scale or bias does not hold one number for each group.
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
    # Behind the groups, where exporters write the scale of each channel and the recognition of the layer looks for it.
    scale, bias = (_per_channel(vector, x, channels // groups) for vector in (scale, bias))
    replace_node(node, builder.op("Reshape", normalized, shape, like=x) * scale + bias)


def _per_channel(vector: Tensor, x: Tensor, repeats: int) -> Tensor:
    """Repeat the number of each group for its channels: [groups] to [C, 1, ...]."""
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
