"""Batch normalization in the branches of an If: the running statistics move in the branch that is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, bodies
from burnish.norms.policies import CUMULATIVE, BatchStatistics, NormPolicy, Renorm, layer_name
from burnish.norms.training import BRANCH_METADATA, RunningStatistics

BindLayer = Callable[[ir.Graph, ir.Node, NormPolicy, RunningStatistics], None]


def is_branching(node: ir.Node) -> bool:
    return node.op_type == "If" and node.domain == ""


def bind_layers(
    graph: ir.Graph,
    policies: Mapping[ir.Node, NormPolicy],
    statistics: RunningStatistics,
    bind: BindLayer,
    names: Names | None = None,
) -> None:
    """Bind the batch normalization nodes of a graph and of the branches in it, in place and in their order.

    An If returns what its branches make of the running statistics: the next ones from the branch that has the layer, and those
    that there were from the other.

    Args:
        graph: the graph.
        policies: of each batch normalization node outside of loops.
        statistics: of the graph; they are updated.
        bind: binds one node, in the graph that it is in.
        names: in use, where the graph is itself a branch.

    Raises:
        ConfigurationError: a layer in a branch counts the steps in which it normalizes.
    """
    is_branch = names is not None
    for node in list(graph):
        if node in policies:
            if is_branch:
                _check_no_count(node, policies[node])
            bind(graph, node, policies[node], statistics)
        elif is_branching(node):
            names = names or Names.of(graph)
            _bind_branches(graph, node, policies, statistics, bind, names)


def _check_no_count(node: ir.Node, policy: NormPolicy) -> None:
    if isinstance(policy, Renorm) or (isinstance(policy, BatchStatistics) and policy.momentum == CUMULATIVE):
        name = layer_name(node)
        raise ConfigurationError(
            f"norm: the batch normalization '{name}' is in a branch, and '{policy}' counts the steps in which it normalizes, "
            f"which are not known there: choose another policy, norm={{'{name}': 'train'}}"
        )


def _bind_branches(
    graph: ir.Graph,
    node: ir.Node,
    policies: Mapping[ir.Node, NormPolicy],
    statistics: RunningStatistics,
    bind: BindLayer,
    names: Names,
) -> None:
    before = statistics.updated
    layers = [layer for body in bodies(node) for layer in body if isinstance(policies.get(layer), BatchStatistics)]
    if layers:
        node.metadata_props[BRANCH_METADATA] = layer_name(layers[0])
    branches: list[tuple[ir.Graph, dict[ir.Value, ir.Value]]] = []
    for body in bodies(node):
        statistics.replaced(before)
        body.opset_imports.update(graph.opset_imports)
        bind_layers(body, policies, statistics, bind, names)
        branches.append((body, statistics.replaced(before)))
    moved = dict.fromkeys(
        value for _, updated in branches for value, following in updated.items() if before.get(value) is not following
    )
    for value in moved:
        for body, updated in branches:
            following = updated.get(value, value)
            builder = Builder(body)
            body.outputs.append(builder.op("Identity", builder.tensor(following), like=builder.tensor(value)).value)
        node.resize_outputs(len(node.outputs) + 1)
        output = node.outputs[-1]
        output.name, output.type = names.take(f"{node.outputs[0].name}:{value.name}"), value.type
        output.shape = None if value.shape is None else ir.Shape(value.shape.dims)
        statistics.updated[value] = output
