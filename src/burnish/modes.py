"""Training and inference from one source graph: batch normalization and dropout are bound to a mode here.

A source exported in training mode and one exported in inference mode are specialized alike: what the exporter wrote in
``training_mode`` does not matter, only the mode asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, describe_node, replace_node, replace_value
from burnish.norms import NormPolicy, RunningVariance
from burnish.ops import Operation, find_training_form
from burnish.ops.normalization import batch_norm_training, elements_per_channel
from burnish.random import dropout


def batch_normalizations(graph: ir.Graph) -> list[ir.Node]:
    """The batch normalization nodes of a graph, in its order."""
    return [node for node in graph if node.op_type == "BatchNormalization" and node.domain == ""]


def bind_training(
    graph: ir.Graph,
    policies: Mapping[ir.Node, NormPolicy],
    running_variance: RunningVariance,
    key: ir.Value,
    step: Callable[[], ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Specialize a graph to training, in place.

    Args:
        graph: the graph; its batch normalization and dropout nodes are replaced.
        policies: the policy of each batch normalization node.
        running_variance: which batch variance enters the running variance.
        key: the random key that dropout draws from; every dropout node has a stream of its own.
        step: gives the step counter, an int64 scalar; called only when a policy changes over training.

    Returns:
        For every running statistic that a step updates, its next value.
    """
    updated: dict[ir.Value, ir.Value] = {}
    for node in batch_normalizations(graph):
        if policies[node] is NormPolicy.FROZEN:
            _bind_frozen(node)
        else:
            _bind_batch_statistics(graph, node, running_variance, updated)
    for stream, node in enumerate(_dropouts(graph)):
        _bind_dropout(graph, node, key, stream)
    _put_training_forms(graph)
    return updated


def bind_inference(graph: ir.Graph) -> None:
    """Specialize a graph to inference, in place: running statistics, and no dropout."""
    for node in batch_normalizations(graph):
        _bind_frozen(node)
    for node in _dropouts(graph):
        _remove_dropout(node)


def bind_as_exported(graph: ir.Graph) -> None:
    """Leave every node in the mode it was exported in, made differentiable, in place.

    Training-mode batch normalization exposes its statistics, and updates its running outputs by the standard's rule.
    """
    for node in batch_normalizations(graph):
        if _attribute(node, "training_mode", 0):
            _bind_batch_statistics(graph, node, RunningVariance.ONNX, {})
    _put_training_forms(graph)


def _put_training_forms(graph: ir.Graph) -> None:
    """Replace the operators that have a form of their own for training."""
    for node in list(graph):
        rule = find_training_form(node, graph.opset_imports[""])
        if rule is not None:
            replace_node(node, rule(Operation(node, Builder(graph, before=node))))


def _bind_frozen(node: ir.Node) -> None:
    node.attributes.pop("training_mode", None)
    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            output.replace_all_uses_with(running, replace_graph_outputs=True)
    node.resize_outputs(1)


def _bind_batch_statistics(
    graph: ir.Graph, node: ir.Node, running_variance: RunningVariance, updated: dict[ir.Value, ir.Value]
) -> None:
    builder = Builder(graph, before=node)
    x, scale, bias, running_mean, running_var = (builder.tensor(value) for value in node.inputs[:5] if value is not None)
    momentum = float(_attribute(node, "momentum", 0.9))
    y, mean, _, variance = batch_norm_training(builder, x, scale, bias, float(_attribute(node, "epsilon", 1e-5)))
    if running_variance is RunningVariance.PYTORCH:
        count = elements_per_channel(x)
        # A single element per channel has variance 0; dividing by N - 1 = 0 would make it NaN.
        variance = variance * (count / builder.op("Max", count - 1, 1))
    following = []
    for running, batch in ((running_mean, mean), (running_var, variance)):
        current = updated.get(running.value, running.value)
        following.append(_blend(builder.tensor(current), batch, momentum))
        updated[running.value] = following[-1].value
    for output, replacement in zip(node.outputs, (y, *following), strict=False):
        replace_value(output, replacement.value)
    graph.remove(node, safe=True)


def _blend(running: Tensor, batch: Tensor, momentum: float) -> Tensor:
    """``running * momentum + batch * (1 - momentum)``: momentum is what is retained."""
    return running * momentum + batch * (1.0 - momentum)


def _dropouts(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == "Dropout" and node.domain == ""]


def _bind_dropout(graph: ir.Graph, node: ir.Node, key: ir.Value, stream: int) -> None:
    builder = Builder(graph, before=node)
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        raise ConfigurationError(
            f"{describe_node(node)}: its mask is read by the model, and a mask drawn from a key has no such output; "
            "remove the use of the mask from the model"
        )
    x = builder.tensor(node.inputs[0])  # type: ignore[arg-type]
    given = node.inputs[1] if len(node.inputs) > 1 else None
    ratio: Tensor | float = 0.5 if given is None else builder.tensor(given)
    if isinstance(ratio, Tensor) and ratio.array is not None:
        ratio = float(ratio.array)
    replace_value(node.outputs[0], dropout(builder, x, ratio, builder.tensor(key), stream).value)
    graph.remove(node, safe=True)


def _remove_dropout(node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    data = node.inputs[0]
    assert data is not None
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        builder = Builder(graph, before=node)
        everything = builder.op("Expand", builder.constant(np.asarray(True)), builder.op("Shape", builder.tensor(data)))
        replace_value(node.outputs[1], everything.value)
    replace_value(node.outputs[0], data)
    graph.remove(node, safe=True)


def _attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value
