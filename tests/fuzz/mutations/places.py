"""Where in a model something may be changed: its graphs, nodes, values and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from fuzz.values import NAMES


def graphs(model: ModelProto) -> list[GraphProto]:
    """Every graph, bodies included."""
    graphs = [model.graph]
    for info in model.training_info:
        graphs += [info.initialization, info.algorithm]
    for graph in graphs:  # grows while it is gone through
        graphs += _bodies(graph.node)
    for function in model.functions:
        inner = _bodies(function.node)
        for graph in inner:
            inner += _bodies(graph.node)
        graphs += inner
    return graphs


def _bodies(nodes: Any) -> list[GraphProto]:
    return [body for node in nodes for attribute in node.attribute for body in _bodies_of(attribute)]


def _bodies_of(attribute: AttributeProto) -> Iterator[GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def node_lists(model: ModelProto) -> list[Any]:
    return [
        nodes for nodes in (*(graph.node for graph in graphs(model)), *(function.node for function in model.functions)) if nodes
    ]


def some_nodes(random: Random, model: ModelProto) -> Any:
    """The nodes of one graph or function: mostly of the main one."""
    if model.graph.node and random.random() < 0.6:
        return model.graph.node
    lists = node_lists(model)
    return random.choice(lists) if lists else None


def some_node(random: Random, model: ModelProto) -> NodeProto | None:
    nodes = some_nodes(random, model)
    return None if nodes is None else random.choice(nodes)


def values_of(model: ModelProto) -> list[str]:
    """Names of values anywhere in a model."""
    names: dict[str, None] = {}
    for graph in graphs(model):
        names |= dict.fromkeys(value.name for value in (*graph.input, *graph.output))
        names |= dict.fromkeys(tensor.name for tensor in graph.initializer)
    for nodes in node_lists(model):
        names |= dict.fromkeys(name for node in nodes for name in node.output)
    return list(names) or [""]


def some_name(random: Random, model: ModelProto) -> str:
    return random.choice(values_of(model)) if random.random() < 0.75 else random.choice(NAMES)


@cache
def operators() -> list[tuple[str, str]]:
    return sorted({(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()})


def removed(items: Any, index: int) -> Any:
    item = items[index]
    del items[index]
    return item


def tensors_of(model: ModelProto) -> list[TensorProto]:
    found = [tensor for graph in graphs(model) for tensor in graph.initializer]
    for nodes in node_lists(model):
        found += [attribute.t for node in nodes for attribute in node.attribute if attribute.HasField("t")]
    return found


def changed_list(random: Random, items: Any, draw: Callable[[Random], Any], where: str) -> str:
    chance = random.random()
    if not items or chance < 0.2:
        items.append(draw(random))
    elif chance < 0.4:
        del items[random.randrange(len(items))]
    elif chance < 0.45:
        items.extend([draw(random)] * 300)
    else:
        items[random.randrange(len(items))] = draw(random)
    return f"{where} is {list(items)[:8]}"
