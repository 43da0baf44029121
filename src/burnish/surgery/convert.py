"""Replacement of batch normalization by other kinds of normalization.

The result uses LayerNormalization and InstanceNormalization. The standard's GroupNormalization would be shorter, but ONNX Runtime
computes its variance as E[x²] - E[x]² in float32: at μ/σ = 100 its outputs are off by 3e-4, at 2000 by 0.4 or NaN;
LayerNormalization is within 1e-6 and 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.analysis.layer_selection import Patterns, select_layers
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, attribute_value, describe_node, remove_unread_value, replace_node, static_dimension
from burnish.graph.names import separate_names
from burnish.graph.uses import is_used
from burnish.importer import Source, load
from burnish.norms.policies import layer_name
from burnish.operators.normalization.statistics import per_channel
from burnish.registry import Registry
from burnish.validation import is_whole

Rule = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def convert(source: Source, to: str, layers: Patterns = "*") -> ir.Model:
    """Replace batch normalization by a normalization without batch statistics.

    Scale and bias keep their names and shape [C]; running statistics are removed. Outputs change, so train the model further.

    - ``group:G``: each sample and group of C / G channels (Wu and He 2018), as LayerNormalization over [N, G, C / G · ...], then
      scale and bias per channel.
    - ``layer``: each sample, over channels and positions (Ba et al. 2016), as LayerNormalization over [C, ...] with scale and
      bias expanded over the positions. Equals ``group:1``.
    - ``instance``: each sample and channel (Ulyanov et al. 2016), as InstanceNormalization; in float64, which ONNX Runtime's
      kernel lacks, like ``group:C``.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        to: ``group:<number of groups>``, ``layer`` or ``instance``.
        layers: names or shell-style patterns of layers, by scale (``layer1.bn1`` for ``layer1.bn1.weight``) or node.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: an unknown target, groups that do not divide the channels or hold a single element, a pattern without
            matches, or no batch normalization.
        ModelError: invalid ONNX model.
    """
    target, groups = _parsed(to)
    model = load(source)
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "BatchNormalization" and node.domain == ""]
    if not nodes:
        raise ConfigurationError(
            "convert: the model has no batch normalization layer to replace. Exporters fold them into the convolutions: export "
            "the model in training mode, or put identity layers in their place first with burnish.surgery.insert"
        )
    chosen = select_layers(nodes, layers, "layers", "batch normalization")
    for node in chosen:
        _check(node, target, groups)
    for node in chosen:
        _convert(model.graph, node, target, groups)
    separate_names(model.graph)
    return model


def _parsed(to: str) -> tuple[str, int]:
    def grouped(groups: int) -> tuple[str, int]:
        if not is_whole(groups) or groups < 1:
            raise ConfigurationError(f"convert: groups must be a whole number of 1 or more, such as 'group:32', not {groups!r}")
        return "group", groups

    kinds: Registry[tuple[str, int]] = Registry(
        "normalization", {"group": grouped, "instance": lambda: ("instance", 1), "layer": lambda: ("layer", 1)}, bare=True
    )
    return kinds.resolve(to)


def _check(node: ir.Node, target: str, groups: int) -> None:
    name = layer_name(node)
    x, scale = node.inputs[0], node.inputs[1]
    assert x is not None
    assert scale is not None
    if any(map(is_used, node.outputs[1:])):
        raise ConfigurationError(
            f"convert: the model reads the running statistics that {describe_node(node)} returns, and after the conversion "
            "there are none; remove those outputs from the model, or leave the layer out with layers=..."
        )
    channels = static_dimension(scale.shape, 0) or static_dimension(x.shape, 1)
    if x.shape is None or channels is None:
        raise ConfigurationError(
            f"convert: the rank and the number of channels of '{x.name}', which the layer '{name}' normalizes, are not known; "
            "declare the shapes of the model's inputs"
        )
    if target == "group" and channels % groups:
        raise ConfigurationError(
            f"convert: the layer '{name}' has {channels} channels, which {groups} groups do not divide; the nearest numbers of "
            f"groups that do are {_nearest_divisors(channels, groups)}. Choose one of them, or leave the layer out with layers="
        )
    divided = channels if target == "instance" else groups
    positions = [static_dimension(x.shape, axis) for axis in range(2, len(x.shape))]
    if divided == channels and all(extent == 1 for extent in positions):
        raise ConfigurationError(
            f"convert: the layer '{name}' normalizes [N, {channels}] without positions: with {divided} groups each would hold a "
            "single element, and its output would be the bias alone. Choose fewer groups or 'layer', or leave the layer out with "
            "layers=..."
        )


def _nearest_divisors(channels: int, groups: int) -> str:
    divisors = [number for number in range(1, channels + 1) if channels % number == 0]
    below = [number for number in divisors if number < groups]
    above = [number for number in divisors if number > groups]
    return " and ".join(str(number) for number in (*below[-1:], *above[:1]))


def _convert(graph: ir.Graph, node: ir.Node, target: str, groups: int) -> None:
    assert isinstance(node.graph, ir.Graph)
    node.graph.opset_imports.update(graph.opset_imports)  # for branches and loop bodies
    builder = Builder(node.graph, before=node)
    x, scale, bias = (builder.tensor(value) for value in node.inputs[:3] if value is not None)
    statistics = [value for value in node.inputs[3:5] if value is not None]
    epsilon = float(attribute_value(node, "epsilon", 1e-5))
    if target == "instance" and x.dtype != ir.DataType.DOUBLE:
        y = builder.op("InstanceNormalization", x, scale, bias, epsilon=epsilon, like=x)
    elif target == "instance":
        y = _by_groups(x, scale, bias, epsilon, scale.dimension(0) or x.dimension(1) or 1)
    elif groups == 1:
        y = _over_samples(x, scale, bias, epsilon)
    else:
        y = _by_groups(x, scale, bias, epsilon, groups)
    replace_node(node, y)
    for value in statistics:
        remove_unread_value(graph, value)


def _over_samples(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    builder = x.builder
    if x.rank != 2:
        # Runtimes differ in the broadcasting they support, so scale and bias get the whole normalized shape.
        shape = builder.op("Shape", x, start=1)
        extents = None if x.shape is None else ir.Shape(x.shape.dims[1:])
        scale, bias = (builder.op("Expand", per_channel(vector, x), shape, shape=extents) for vector in (scale, bias))
    return builder.op("LayerNormalization", x, scale, bias, axis=1, epsilon=epsilon, like=x)


def _by_groups(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, groups: int) -> Tensor:
    builder = x.builder
    grouped = builder.op("Reshape", x, builder.integers([0, groups, -1]))
    one = builder.constant(np.ones(1, x.dtype.numpy()))
    ones = builder.op("Expand", one, builder.op("Shape", grouped, start=2))
    normalized = builder.op("LayerNormalization", grouped, ones, axis=-1, epsilon=epsilon, like=grouped)
    restored = builder.op("Reshape", normalized, builder.op("Shape", x), like=x)
    return restored * per_channel(scale, x) + per_channel(bias, x)
