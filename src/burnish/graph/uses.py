"""Readers of values, replacement of values, and removal of nodes, in time independent of the graph's size.

``onnx_ir`` walks over all outputs of a graph to remove a node or replace a value. Training graphs have an output per parameter,
so a rewrite of every layer would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from burnish.graph.annotations import Fact
from burnish.graph.attributes import bodies

OUTPUT_POSITIONS = Fact[dict[int, list[int]]]("burnish.output_positions")
"""Graph: positions of outputs by the identity of the value. They are hints and must be checked."""


def remove_node(node: ir.Node) -> None:
    """Remove a node from its graph and from the uses of its inputs.

    Raises:
        ValueError: an output of the node is read or is an output of the graph.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for output in node.outputs:
        if output.uses() or output.is_graph_output():
            raise ValueError(f"{node!r} cannot be removed: '{output.name}' is still read")
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    # Graph.remove does the same, but scans every output of the graph.
    graph._nodes.remove(node)
    node.graph = None


def copy_of(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a copy of a node with other inputs; its outputs have the same dtypes and shapes."""
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for output, copied in zip(node.outputs, copy.outputs, strict=True):
        copied.type, copied.shape = output.type, None if output.shape is None else ir.Shape(output.shape.dims)
    return copy


def replace_uses(value: ir.Value, replacement: ir.Value, but: ir.Node | None = None) -> None:
    """Replace a value for all readers and as a graph output; both keep their names.

    The node ``but``, which computes the replacement from it, still reads ``value``.
    """
    for reader, index in tuple(value.uses()):
        if reader is not but:
            reader.replace_input_with(index, replacement)
    replace_output(value, replacement)


def replace_output(value: ir.Value, replacement: ir.Value) -> None:
    """Replace a value as an output of the graph; both keep their names."""
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
    """Return the positions of a graph output: at least one, and all that were indexed."""
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
    """True if a value is read or is a graph output."""
    return bool(value.uses()) or value.is_graph_output()


def is_read(node: ir.Node) -> bool:
    """True if an output of a node is read or is a graph output."""
    return any(map(is_used, node.outputs))


def captured_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values captured by the subgraphs of a node."""
    for body in bodies(node):
        graphs = (body, *body.subgraphs())
        held = {value for graph in graphs for value in (*graph.inputs, *graph.initializers.values())}
        held.update(output for inside in body.all_nodes() for output in inside.outputs)
        read = [value for inside in body.all_nodes() for value in inside.inputs if value is not None]
        read += [value for graph in graphs for value in graph.outputs]
        yield from (value for value in read if value not in held)


def read_by(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node or its subgraphs read."""
    yield from (value for value in node.inputs if value is not None)
    yield from captured_by(node)


def captured_once(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the values captured by the subgraphs of a node, each once."""
    return tuple(dict.fromkeys(captured_by(node)))


def operands_of(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Return the inputs of a node followed by the values captured by its subgraphs, each once."""
    return (*node.inputs, *captured_once(node))


def is_read_once(value: ir.Value) -> bool:
    """True if a value has exactly one use and is not a graph output."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the standard node that produces a value, if it is one of these operators (any if none is given), else None."""
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return None
    return node if not op_types or node.op_type in op_types else None


def origin_of(value: ir.Value, passing: Collection[str]) -> ir.Value:
    """Return the value before nodes of these operators, which pass on their first operand."""
    while (node := producer_of(value, *passing)) is not None and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def ancestors_of(value: ir.Value, back_to: Callable[[ir.Node], bool] = lambda node: False) -> set[ir.Value]:
    """Return a value and everything that it is computed from, including captured values.

    The search stops at nodes for which ``back_to`` is true.
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
    """Return the only reader of a value if it reads it once and is of this operator, else None.

    Args:
        value: the value; a graph output has its caller as another reader.
        op_type: the operator, any by default.
        domain: domain of the operator.
    """
    if not is_read_once(value):
        return None
    user = next(iter(value.uses()))[0]
    fits = op_type is None or (user.op_type == op_type and user.domain == domain)
    return user if fits and user.graph is not None else None


def remove_unread_nodes(graph: ir.Graph) -> bool:
    """Remove unread nodes from a graph and its subgraphs; return True if there were any."""
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
    """Remove these nodes if they belong to the graph and are unread, then everything that only they needed."""
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
    """Sort the nodes of a graph topologically, in place; return True if one moved."""
    before = list(graph)
    graph.sort()
    return any(one is not other for one, other in zip(before, graph, strict=True))


def remove_unused(model: ir.Model) -> bool:
    """Remove, in place, everything that does not contribute to the graph's outputs. Inputs and outputs stay."""
    # The pass below also removes nodes, but each takes time proportional to the number of graph outputs.
    changed = remove_unread_nodes(model.graph)
    # The pass also drops omitted trailing operands and training_mode=0 without reporting a change.
    changed |= _has_what_goes_unsaid(model.graph)
    changed |= RemoveUnusedNodesPass()(model).modified
    changed |= RemoveUnusedOpsetsPass()(model).modified
    model.opset_imports.setdefault("", 18)
    return changed
