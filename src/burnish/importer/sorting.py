"""Nodes that stand before those that they read, as runtimes take them, in the order that the standard asks for."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import bodies, describe_node
from burnish.graph.protos import Body, graphs_within
from burnish.graph.uses import read_by


def is_sorted(graph: ir.Graph | ir.Function) -> bool:
    """Whether every node of a graph or function, and of the bodies in it, stands after those that it reads."""
    following = set(graph)
    for node in graph:
        if any(value.producer() in following for value in read_by(node)) or not all(is_sorted(body) for body in bodies(node)):
            return False
        following.remove(node)
    return True


def with_sorted_nodes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which every node stands after those that it reads, in bodies and functions too, else in the order it had.

    Returns:
        The model itself where it is so already, else a copy.

    Raises:
        ModelError: nodes that read each other in a circle.
    """
    bodies_of = list(graphs_within(proto.graph, *proto.functions))
    orders = [_order(body) for body in bodies_of]
    if all(order == sorted(order) for order in orders):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    # From the innermost out: a node that moves takes its bodies with it.
    for body, order in reversed(list(zip(graphs_within(copy.graph, *copy.functions), orders, strict=True))):
        nodes = [onnx.NodeProto.FromString(body.node[place].SerializeToString()) for place in order]
        body.ClearField("node")
        body.node.extend(nodes)
    return copy


def _order(body: Body) -> list[int]:
    """The places of nodes in the order to compute them in: of those that are ready, the one that stands first comes first."""
    nodes = body.node
    given = {value if isinstance(value, str) else value.name for value in body.input}
    producers = {name: place for place, node in enumerate(nodes) for name in node.output if name and name not in given}
    waits = [{producers[name] for name in _read(node) if name in producers} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for place, awaited in enumerate(waits):
        for producer in awaited:
            readers[producer].append(place)
    missing = [len(awaited) for awaited in waits]
    ready = [place for place, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise _in_a_circle(nodes, waits)
    return order


def _read(node: onnx.NodeProto) -> set[str]:
    """The names that a node and its bodies read of the graph that it is in."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            own = {value.name for value in (*body.input, *body.initializer)}
            own |= {name for inner in body.node for name in inner.output}
            read = {value.name for value in body.output}.union(*map(_read, body.node))
            names |= read - own
    return names


def _in_a_circle(nodes: Sequence[onnx.NodeProto], waits: Sequence[set[int]]) -> ModelError:
    try:
        graphlib.TopologicalSorter(dict(enumerate(waits))).prepare()
    except graphlib.CycleError as error:
        circle = [ir.from_proto(nodes[place]) for place in reversed(error.args[1])]
        said = " reads ".join(describe_node(node) for node in circle)
        return ModelError(f"nodes of the model read each other in a circle: {said}. Export the model again")
    raise AssertionError("nodes that wait for each other are in no circle")
