"""The rule of last resort: a node without one is written out in the operators of its function, where the standard gives one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir

from burnish.graph import Names, bodies
from burnish.graph.edits import copy_of
from burnish.graph.function_bodies import has_function, standard_function, write_out
from burnish.graph.uses import read_by
from burnish.operators.registry import has_gradient
from burnish.operators.semantic import differentiable_outputs


def write_out_functions(graph: ir.Graph, wrt: Collection[ir.Value], of: Collection[ir.Value]) -> None:
    """Write out, in place, the nodes without a gradient rule through which a gradient has to pass and that have a function.

    What the functions of the standard hold may be functions in turn. Outputs of the nodes stay the same values; operators off the
    path stay as they are.

    Args:
        graph: the forward graph.
        wrt: the values whose gradients are wanted.
        of: the values that are differentiated.
    """
    opset = graph.opset_imports[""]
    if not any(_is_candidate(node, opset) for node in graph.all_nodes()):
        return
    names, node_names = Names.of(graph), Names(node.name for node in graph.all_nodes())
    refused: set[ir.Node] = set()
    while pending := [node for node in path(graph, wrt, of) if node not in refused and _is_candidate(node, opset)]:
        for node in pending:
            function = standard_function(node, opset)
            if function is None:
                refused.add(node)
            else:
                write_out(node, function, names, node_names)


def passes_gradient(node: ir.Node, opset: int) -> bool:
    """Whether a gradient passes a node: by a rule, or by those of the operators in its function."""
    if has_gradient(node, opset):
        return True
    if not _is_candidate(node, opset):
        return False
    stand_ins = {value: ir.Value(name=value.name, type=value.type, shape=value.shape) for value in read_by(node)}
    copy = copy_of(node, [None if value is None else stand_ins[value] for value in node.inputs])
    graph = ir.Graph(list(stand_ins.values()), [], nodes=[copy], opset_imports={"": opset})
    for original, output in zip(node.outputs, copy.outputs, strict=True):
        output.name = original.name
    graph.outputs.extend(copy.outputs)
    floats = [value for value in graph.inputs if _carries(value)]
    returned = [value for value in graph.outputs if _carries(value)]
    write_out_functions(graph, floats, returned)
    return all(has_gradient(inner, opset) for inner in path(graph, floats, returned))


def path(graph: ir.Graph, wrt: Iterable[ir.Value], of: Iterable[ir.Value]) -> list[ir.Node]:
    """Return the nodes of a graph, and of the bodies on the way, through which gradients of ``of`` go to ``wrt``."""
    active, needed = set(wrt), set(of)
    for node in graph:
        if any(value in active for value in read_by(node)):
            active.update(differentiable_outputs(node))
    nodes = []
    for node in reversed(graph):
        if any(output in needed and output in active for output in node.outputs):
            needed.update(read_by(node))
            nodes.append(node)
            nodes.extend(_inside(node, active))
    return nodes


def _inside(node: ir.Node, active: set[ir.Value]) -> Iterator[ir.Node]:
    """The nodes on the way through the bodies of a node: from what it carries, and what it reads of the graph around it."""
    for body in bodies(node):
        entering = [value for value in body.inputs if _carries(value)]
        yield from path(body, {*active, *entering}, body.outputs)


def _is_candidate(node: ir.Node, opset: int) -> bool:
    """Whether a node has a function, no rule, and an output that a gradient may come in by."""
    return node.domain == "" and has_function(node.op_type, opset) and not has_gradient(node, opset) and _has_floats(node)


def _has_floats(node: ir.Node) -> bool:
    return any(True for _ in differentiable_outputs(node))


def _carries(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()
