"""Cut a frozen backbone off a model, so that its features are computed once per sample and training starts from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.compiler.draft import shape_of
from burnish.errors import ConfigurationError
from burnish.graph import describe_node
from burnish.graph.annotations import mark_sample_axis
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.graph.uses import is_used, read_by, remove_unused
from burnish.modes import batch_normalizations
from burnish.norms import Frozen, NormPolicy, layer_name
from burnish.operators.extents import Factor, Kind
from burnish.sample_axes import Analysis
from burnish.settings import suggestion

CachedFeatures = str | Sequence[str] | None
"""None; ``auto`` (the values right before the first layer that trains); or names of values, or of nodes (their first output)."""

AUTO = "auto"


@dataclass(frozen=True)
class Backbone:
    """A model in two parts.

    Attributes:
        model: the part that computes the features from the inputs, with its own weights.
        rest: the part that computes the predictions from the features, and from any inputs that it still reads.
        features: names of the values between the two.
        layers: one flag per batch normalization layer of the whole model, in order: True if the layer is in ``rest``.
        axes: sample axis of each feature, by name.
    """

    model: ir.Model
    rest: ir.Model
    features: tuple[str, ...]
    layers: tuple[bool, ...]
    axes: dict[str, int]


def cut_backbone(
    model: ir.Model,
    cached_features: str | Sequence[str],
    trained: Collection[str],
    policies: Mapping[ir.Node, NormPolicy],
    predictions: Sequence[str],
) -> Backbone:
    """Cut a model before the layers that train.

    Args:
        model: a canonical model; not modified.
        cached_features: ``auto``, or the names of the values to cut at.
        trained: the initializers that train.
        policies: policies of the batch normalization layers, without ``auto``.
        predictions: the values that the loss reads.

    Raises:
        ConfigurationError: a name does not exist; something before the cut trains or draws random numbers; the predictions do not
            depend on the value; or it does not hold one entry per sample.
    """
    moving = _moving(model.graph, trained, policies)
    analysis = Analysis(model.graph, [value.name or "" for value in model.graph.inputs])
    if cached_features == AUTO:
        features = _before(model.graph, moving, analysis)
    else:
        features = _named(model.graph, cached_features)
        _check_still(features, moving)
        for value in features:
            _check_samples(value, analysis)
    backbone, rest = model.clone(), model.clone()
    axes = {value.name or "": axis for value in features if (axis := _axis(value, analysis)) is not None}
    layers = _rest_of(rest, axes, predictions, _samples_of(model.graph, analysis))
    names = tuple(axes)
    _keep(backbone, names)
    return Backbone(backbone, rest, names, layers, axes)


def _moving(graph: ir.Graph, trained: Collection[str], policies: Mapping[ir.Node, NormPolicy]) -> dict[ir.Node, str]:
    """Return each node whose results for the same sample change from step to step, with the reason."""
    wanted = {graph.initializers[name]: f"'{name}' trains" for name in trained if name in graph.initializers}
    layers = {node: policy for node, policy in policies.items() if not isinstance(policy, Frozen)}
    moving: dict[ir.Node, str] = {}
    for node in graph:
        inside = [node, *(within for body in _bodies(node) for within in body.all_nodes())]
        drawing = next((within for within in inside if within.op_type in RANDOM_OPERATORS and within.domain == ""), None)
        layer = next((within for within in inside if within in layers), None)
        if drawing is not None:
            moving[node] = f"{describe_node(drawing)} draws at random"
        elif layer is not None:
            moving[node] = f"the batch normalization '{layer_name(layer)}' takes statistics of the batch ('{layers[layer]}')"
        for value in read_by(node):
            producer = value.producer()
            reason = wanted.get(value) or (moving.get(producer) if producer is not None else None)
            if reason is not None and node not in moving:
                moving[node] = reason
    return moving


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]


def _before(graph: ir.Graph, moving: Collection[ir.Node], analysis: Analysis) -> list[ir.Value]:
    """Return the values that moving nodes read, no moving node computes, and that hold one entry per sample."""
    read = [value for node in graph if node in moving for value in read_by(node)]
    computed = [value for value in dict.fromkeys(read) if (node := value.producer()) is not None and node not in moving]
    features = [value for value in computed if _problem(value, analysis) is None]
    if not features:
        raise ConfigurationError(
            "cached_features: nothing that a sample alone decides stands before what trains: freeze the layers that are to be "
            "computed once (trainable=[...], or 'frozen' in burnish.optim.groups), or leave cached_features out"
        )
    return features


def _named(graph: ir.Graph, cached_features: str | Sequence[str]) -> list[ir.Value]:
    names = [cached_features] if isinstance(cached_features, str) else list(cached_features)
    values = {output.name or "": output for node in graph for output in node.outputs}
    nodes = {node.name or "": node for node in graph}
    if not names:
        raise ConfigurationError("cached_features=[]: give the name of a value or node at least, or 'auto'")
    chosen: dict[ir.Value, None] = {}
    for name in names:
        value = values.get(name) or (nodes[name].outputs[0] if name in nodes else None)
        if value is None:
            raise ConfigurationError(
                f"cached_features: the model computes no value '{name}', nor has it a node of this name"
                f"{suggestion(name, [*values, *nodes])}: name one, or say 'auto'"
            )
        chosen[value] = None
    return [*chosen]


def _check_still(features: Iterable[ir.Value], moving: Mapping[ir.Node, str]) -> None:
    for value in features:
        node = value.producer()
        if node is not None and node in moving:
            raise ConfigurationError(
                f"cached_features: '{value.name}' would not stay as it is: {moving[node]}, and stands before it. Freeze what "
                "stands before it, name a value further to the front, or say 'auto'"
            )


def _problem(value: ir.Value, analysis: Analysis) -> str | None:
    """Return the reason why a value does not hold one entry per sample; None if it does."""
    layout = analysis.layout(value)
    if layout.is_constant:
        return "is the same for every batch"
    if layout.axes is None or value.dtype is None:
        return f"has a shape that is not known{f' ({layout.reason})' if layout.reason else ''}"
    axis = _axis(value, analysis)
    if axis is None:
        return "does not have the samples, and nothing else, along an axis"
    others = [*layout.axes[:axis], *layout.axes[axis + 1 :]]
    if any(isinstance(factor, Factor) and factor.kind is not Kind.FIXED for each in others for factor in each):
        return "has samples along a further axis"
    return None


def _axis(value: ir.Value, analysis: Analysis) -> int | None:
    for at, axis in enumerate(analysis.layout(value).axes or ()):
        if len(axis) == 1 and isinstance(axis[0], Factor) and axis[0].kind is Kind.SAMPLES:
            return at
    return None


def _check_samples(value: ir.Value, analysis: Analysis) -> None:
    problem = _problem(value, analysis)
    if problem is not None:
        raise ConfigurationError(
            f"cached_features: '{value.name}' {problem}, so that it cannot be kept sample by sample: name another value, or "
            "say 'auto'"
        )


def _samples_of(graph: ir.Graph, analysis: Analysis) -> int | str | None:
    shapes = {value.name: shape_of(value) or () for value in graph.inputs}
    return next(shapes[name][axis] for name, axis in analysis.axes.items() if axis is not None)


def _rest_of(
    rest: ir.Model,
    features: Mapping[str, int],
    predictions: Sequence[str],
    samples: int | str | None,
) -> tuple[bool, ...]:
    """Make a model start at the features (name: sample axis), in place; return True for each batch normalization that stays."""
    graph = rest.graph
    layers = batch_normalizations(graph)
    by_name = {output.name or "": output for node in graph for output in node.outputs}
    for name, axis in features.items():
        value = by_name[name]
        extents = [*(value.shape or ())]
        given = ir.Value(name=name, type=value.type, shape=ir.Shape([*extents[:axis], samples, *extents[axis + 1 :]]))
        if axis:
            mark_sample_axis(given, axis)
        value.replace_all_uses_with(given, replace_graph_outputs=True)
        value.name = f"{name}:computed"
        graph.inputs.append(given)
        by_name[name] = given
    graph.outputs.clear()
    graph.outputs.extend(dict.fromkeys(by_name[name] for name in predictions))
    remove_unused(rest)
    unread = [name for name in features if not by_name[name].uses()]
    if unread or any(value.is_graph_input() for value in graph.outputs):
        name = unread[0] if unread else next(iter(features))
        raise ConfigurationError(
            f"cached_features: what the loss reads does not depend on '{name}', or is that itself: name a value between the "
            "inputs and the layers that train, or say 'auto'"
        )
    inputs = [value for value in graph.inputs if is_used(value)]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    left = {*batch_normalizations(graph)}
    return tuple(node in left for node in layers)


def _keep(backbone: ir.Model, features: Collection[str]) -> None:
    graph = backbone.graph
    by_name = {output.name or "": output for node in graph for output in node.outputs}
    graph.outputs.clear()
    graph.outputs.extend(by_name[name] for name in features)
    remove_unused(backbone)
