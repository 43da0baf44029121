"""Nodes deleted, copied, moved, and of other operators, operands and names."""

from __future__ import annotations

from random import Random

from onnx import ModelProto, NodeProto

from fuzz.mutations.places import graphs, node_lists, operators, removed, some_name, some_node, some_nodes, values_of
from fuzz.mutations.registry import mutation
from fuzz.values import DOMAINS, NAMES


@mutation(3)
def delete_node(random: Random, model: ModelProto) -> str | None:
    nodes = some_nodes(random, model)
    if nodes is None:
        return None
    node = removed(nodes, random.randrange(len(nodes)))
    return f"delete node {node.name or node.op_type}"


@mutation(3)
def duplicate_node(random: Random, model: ModelProto) -> str | None:
    nodes = some_nodes(random, model)
    if nodes is None:
        return None
    node = random.choice(nodes)
    copy = nodes.add()
    copy.CopyFrom(node)
    if random.random() < 0.5:
        del copy.output[:]
        copy.output.extend(f"{name}_copy" for name in node.output)
        copy.name = f"{node.name}_copy"
    return f"duplicate node {node.name or node.op_type}"


@mutation(2)
def move_node(random: Random, model: ModelProto) -> str | None:
    nodes = some_nodes(random, model)
    if nodes is None or len(nodes) < 2:
        return None
    order = list(nodes)
    first, second = random.sample(range(len(order)), 2)
    order.insert(second, order.pop(first))
    copies = [NodeProto.FromString(node.SerializeToString()) for node in order]
    del nodes[:]
    nodes.extend(copies)
    return f"move node {first} to {second}"


@mutation(4)
def change_operator(random: Random, model: ModelProto) -> str | None:
    node = some_node(random, model)
    if node is None:
        return None
    before = node.op_type
    chance = random.random()
    if chance < 0.6:
        node.domain, node.op_type = random.choice(operators())
    elif chance < 0.8 and (other := some_node(random, model)) is not None:
        node.domain, node.op_type = other.domain, other.op_type
    elif chance < 0.9:
        node.domain = random.choice(DOMAINS)
    else:
        node.op_type = random.choice(NAMES)
    return f"{before} becomes {node.domain}.{node.op_type[:40]!r}"


@mutation(5)
def change_input(random: Random, model: ModelProto) -> str | None:
    """Another value, an absent one, one more, one less, or the node's own output."""
    node = some_node(random, model)
    if node is None:
        return None
    chance = random.random()
    if not node.input or chance < 0.2:
        node.input.append(some_name(random, model))
        return f"one more input of {node.op_type}: {node.input[-1][:40]!r}"
    index = random.randrange(len(node.input))
    if chance < 0.35:
        return f"{node.op_type} loses its input {index}: {removed(node.input, index)!r}"
    if chance < 0.45 and node.output:
        node.input[index] = random.choice(node.output)
    elif chance < 0.55:
        node.input[index] = ""
    elif chance < 0.65:
        other = random.randrange(len(node.input))
        node.input[index], node.input[other] = node.input[other], node.input[index]
    else:
        node.input[index] = some_name(random, model)
    return f"input {index} of {node.op_type} is {node.input[index][:40]!r}"


@mutation(3)
def change_output(random: Random, model: ModelProto) -> str | None:
    node = some_node(random, model)
    if node is None:
        return None
    chance = random.random()
    if not node.output or chance < 0.3:
        node.output.append(some_name(random, model))
        return f"one more output of {node.op_type}: {node.output[-1][:40]!r}"
    index = random.randrange(len(node.output))
    if chance < 0.5:
        return f"{node.op_type} loses its output {index}: {removed(node.output, index)!r}"
    node.output[index] = "" if chance < 0.65 else some_name(random, model)
    return f"output {index} of {node.op_type} is {node.output[index][:40]!r}"


@mutation(2)
def rename_value(random: Random, model: ModelProto) -> str | None:
    """A value is called something else wherever it stands: a name that others have, or a strange one."""
    before, after = random.choice(values_of(model)), some_name(random, model)
    for nodes in node_lists(model):
        for node in nodes:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    if name == before:
                        names[index] = after
    for graph in graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            if value.name == before:
                value.name = after
    return f"value {before[:40]!r} is called {after[:40]!r}"


@mutation(1)
def rename_node(random: Random, model: ModelProto) -> str | None:
    node = some_node(random, model)
    if node is None:
        return None
    other = some_node(random, model)
    node.name = other.name if other is not None and random.random() < 0.5 else random.choice(NAMES)
    return f"a {node.op_type} is named {node.name[:40]!r}"
