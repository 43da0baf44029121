"""Uses of values: who reads one, its replacement, and removal of nodes, in time that does not grow with the graph.

``onnx_ir`` walks over all outputs of a graph to remove a node or to replace a value, and a training graph has an output for each
parameter: a rewrite of every layer would take time with the square of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from burnish.graph.annotations import Fact
from burnish.graph.attributes import bodies

OUTPUT_POSITIONS = Fact[dict[int, list[int]]]("burnish.output_positions")
"""Of a graph: the positions of outputs by the identity of the value. They are hints, to be checked."""


def remove_node(node: ir.Node) -> None:
    """Take a node out of its graph, and out of the uses of what it reads.

    Raises:
        ValueError: something reads an output of the node, or it is an output of the graph.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for output in node.outputs:
        if output.uses() or output.is_graph_output():
            raise ValueError(f"{node!r} cannot be removed: '{output.name}' is still read")
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    # Graph.remove does the same after a look at every output of the graph.
    graph._nodes.remove(node)
    node.graph = None


def copy_of(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a node of the same operator and attributes over other inputs; its outputs have the same dtypes and shapes."""
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for output, copied in zip(node.outputs, copy.outputs, strict=True):
        copied.type, copied.shape = output.type, None if output.shape is None else ir.Shape(output.shape.dims)
    return copy


def replace_uses(value: ir.Value, replacement: ir.Value, but: ir.Node | None = None) -> None:
    """Let ``replacement`` stand wherever ``value`` is read, as an output of the graph too; both keep their names.

    The node ``but`` goes on to read ``value``: the one that makes the replacement of it.
    """
    for reader, index in tuple(value.uses()):
        if reader is not but:
            reader.replace_input_with(index, replacement)
    replace_output(value, replacement)


def replace_output(value: ir.Value, replacement: ir.Value) -> None:
    """Let ``replacement`` be an output of the graph wherever ``value`` is one; both keep their names."""
    while value is not replacement and value.is_graph_output():
        graph = value.graph
        assert graph is not None
        positions = _output_positions(graph, value)
        for position in positions:
            graph.outputs[position] = replacement
        hints = OUTPUT_POSITIONS.get(graph)
        assert hints is not None
        hints.setdefault(id(replacement), []).extend(positions)


def _output_positions(graph: ir.Graph, value: ir.Value) -> list[int]:
    """Positions at which a value, which is an output of a graph, is one: at least one, and all as far as outputs were indexed."""
    outputs = graph.outputs
    hints = OUTPUT_POSITIONS.get(graph) or {}
    positions = [position for position in hints.get(id(value), ()) if position < len(outputs) and outputs[position] is value]
    if positions:
        return positions
    hints = {}
    for position, output in enumerate(outputs):
        hints.setdefault(id(output), []).append(position)
    OUTPUT_POSITIONS.set(graph, hints)
    return hints[id(value)]


def is_used(value: ir.Value) -> bool:
    """Whether anything reads a value, or the graph returns it."""
    return bool(value.uses()) or value.is_graph_output()


def is_read(node: ir.Node) -> bool:
    """Whether anything reads an output of a node, or the graph returns one."""
    return any(map(is_used, node.outputs))


def captured_by(node: ir.Node) -> Iterator[ir.Value]:
    """Give the values of the graphs around a node that its branches and loop bodies read."""
    for body in bodies(node):
        graphs = (body, *body.subgraphs())
        held = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        held.update(output for inside in body.all_nodes() for output in inside.outputs)
        read = [value for inside in body.all_nodes() for value in inside.inputs if value is not None]
        read += [value for graph in graphs for value in graph.outputs]
        yield from (value for value in read if value not in held)


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Give the values that a node reads, those that only its branches or loop bodies read among them."""
    yield from (value for value in node.inputs if value is not None)
    yield from captured_by(node)


def captured_once(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the values of the graphs around a node that its branches and loop bodies read, each once."""
    return tuple(dict.fromkeys(captured_by(node)))


def operands_of(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Return the inputs of a node, and after them what its bodies read of the graphs around it, each value once."""
    return (*node.inputs, *captured_once(node))


def is_read_once(value: ir.Value) -> bool:
    """Whether a value is read at one place, and is no output of the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the standard node that makes a value, where it is of one of these operators (of any, where none is named)."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    return node if not op_types or node.op_type in op_types else None


def origin_of(value: ir.Value, passing: Collection[str]) -> ir.Value:
    """Return what a value is before nodes of these operators, which pass their first operand on."""
    while (node := producer_of(value, *passing)) is not None and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def ancestors_of(value: ir.Value, back_to: Callable[[ir.Node], bool] = lambda node: False) -> set[ir.Value]:
    """Return a value and all that it is computed from, what bodies read of the graphs around them too.

    The search goes back to the nodes for which ``back_to`` is true, and not to what these read.
    """
    found, pending = {value}, [value]
    while pending:
        node = pending.pop().producer()
        read = () if node is None or back_to(node) else read_by(node)
        following = [operand for operand in read if operand not in found]
        found.update(following)
        pending.extend(following)
    return found


def only_user(value: ir.Value, op_type: str | None = None, domain: str = "") -> ir.Node | None:
    """Return the node that alone reads a value, once, and is of an operator; None where there is no such node.

    Args:
        value: what is read; an output of the graph is read by its caller too.
        op_type: the operator, any by default.
        domain: of the operator.
    """
    if not is_read_once(value):
        return None
    user = next(iter(value.uses()))[0]
    fits = op_type is None or (user.op_type == op_type and user.domain == domain)
    return user if fits and user.graph is not None else None


def remove_unread_nodes(graph: ir.Graph) -> bool:
    """Remove the nodes of a graph, and of the bodies in it, whose outputs nothing reads; return whether there were any."""
    changed = False
    for node in reversed(graph):
        if not is_read(node):
            remove_node(node)
            changed = True
            continue
        for body in bodies(node):
            changed |= remove_unread_nodes(body)
    return changed


_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def _has_what_goes_unsaid(graph: ir.Graph) -> bool:
    for node in graph:
        operands = node.inputs
        if operands and operands[-1] is None:
            return True
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes:
            return True
        if node.op_type in _CONTROL and any(map(_has_what_goes_unsaid, bodies(node))):
            return True
    return False


def remove_unread(graph: ir.Graph, *nodes: ir.Node | None) -> None:
    """Remove those of the nodes that are of the graph and that nothing reads, and then what was made or stored for them alone."""
    pending = [node for node in reversed(nodes) if node is not None]
    while pending:
        node = pending.pop()
        if node.graph is not graph or is_read(node):
            continue
        operands = [value for value in node.inputs if value is not None]
        remove_node(node)
        for value in operands:
            producer = value.producer()
            if producer is not None:
                pending.append(producer)
            elif value.is_initializer() and not is_used(value):
                graph.initializers.pop(value.name or "", None)


def sort(graph: ir.Graph) -> bool:
    """Order the nodes of a graph, in place, so that each stands after those that it reads; return whether one moved."""
    before = list(graph)
    graph.sort()
    return any(one is not other for one, other in zip(before, graph, strict=True))


def remove_unused(model: ir.Model) -> bool:
    """Drop, in place, what does not contribute to the graph's outputs. Inputs and outputs stay as they are."""
    # The pass removes nodes too, and each takes it as long as the graph has outputs.
    changed = remove_unread_nodes(model.graph)
    # It drops operands that are left out at the end, and training_mode=0, and does not say so.
    changed |= _has_what_goes_unsaid(model.graph)
    changed |= RemoveUnusedNodesPass()(model).modified
    changed |= RemoveUnusedOpsetsPass()(model).modified
    model.opset_imports.setdefault("", 18)
    return changed
