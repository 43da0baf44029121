"""Split a translated graph into a forward and a backward pass, which PyTorch's autograd calls separately.

``burnish.Cotangents`` separates the passes while the graph is rewritten and translated: it reads every result of the forward
pass, and returns the incoming cotangents. So a node that needs a cotangent waits for the whole forward pass, and no fused kernel
crosses the border.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch import fx

from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor
from burnish.kernels.engine_operator import EngineOperator

COTANGENTS = EngineOperator("Cotangents", ("y...",), ("dy...",))

_PARTS = {operator.getitem, torch.ops.aten.sym_size.int}


class Split(NamedTuple):
    """The two passes.

    Attributes:
        forward: takes the inputs of the graph, and returns its results, followed by the values that the backward pass reads.
        backward: takes a list of these values, followed by the cotangents, and returns the gradients. It empties the list, so
            that a value without other references is freed after its last use.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule


def emit_cotangents(builder: Builder, results: Sequence[ir.Value], differentiated: Sequence[ir.Value]) -> list[Tensor]:
    """Emit the node that separates the passes.

    Args:
        builder: builder that emits at the end of the forward pass.
        results: all results of the forward pass.
        differentiated: results that have cotangents.

    Returns:
        The cotangents, with the dtypes and shapes of ``differentiated``.
    """
    order = [*differentiated, *(value for value in results if value not in set(differentiated))]
    node = ir.Node(BURNISH_DOMAIN, COTANGENTS.name, order, num_outputs=len(differentiated))
    builder.graph.append(node)
    for output, value in zip(node.outputs, differentiated, strict=True):
        output.name = f"cotangent:{value.name}"
        output.type = value.type
        output.shape = value.shape
    return [builder.tensor(output) for output in node.outputs]


@translates(COTANGENTS)
def _cotangents(op: Call) -> tuple[Any, ...]:
    operands: list[Any] = op.tensors()
    arrived = operands[0].tracer.create_proxy("call_function", _arrive, tuple(operands), {})
    return tuple(arrived[index] for index in range(len(op.node.outputs)))


def _arrive(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise NotImplementedError("a graph with cotangents is run in its two parts")


def split(module: fx.GraphModule, results: int, cotangents: int) -> Split:
    """Split a translated graph.

    Args:
        module: graph whose outputs are the results of the forward pass, followed by the gradients.
        results: number of results.
        cotangents: number of cotangents.
    """
    nodes = list(module.graph.nodes)
    outputs: tuple[Any, ...] = nodes[-1].args[0]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    forward = _needed(node for node in outputs[:results] if isinstance(node, fx.Node))
    forward.update(placeholders)
    arriving = _arriving(nodes, cotangents)
    backward = _needed((node for node in outputs[results:] if isinstance(node, fx.Node)), forward | set(arriving.values()))
    # A part of a result, or its extent, takes less memory than the result itself.
    forward.update(node for node in nodes if node.target in _PARTS and node.args[0] in forward)
    backward -= forward
    read = {source: None for node in nodes if node in backward for source in node.all_input_nodes}
    read |= {node: None for node in outputs[results:] if isinstance(node, fx.Node)}
    saved = [node for node in read if node in forward and node.op != "get_attr"]
    constants = [node for node in read if node.op == "get_attr"]
    first = _first_part(module, placeholders, [node for node in nodes if node in forward], (*outputs[:results], *saved))
    given = [*saved, *(arriving.get(index) for index in range(cotangents))]
    inside = [node for node in nodes if node in backward or node in constants]
    return Split(first, _second_part(module, given, inside, outputs[results:]))


def _needed(targets: Iterable[fx.Node], known: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes that targets depend on, and the targets, up to known nodes."""
    known, needed, waiting = set(known), set(), list(targets)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in known:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    return needed


def _arriving(nodes: Sequence[fx.Node], cotangents: int) -> dict[int, fx.Node]:
    """Return the graph's node for each cotangent, by position; those that no gradient reads are absent."""
    arriving: dict[int, fx.Node] = {}
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.target is _arrive:
            position = node.args[1]
            assert isinstance(position, int)
            assert position < cotangents
            arriving[position] = node
    return arriving


def _taken(inputs: list[Any]) -> tuple[Any, ...]:
    taken = tuple(inputs)
    inputs.clear()
    return taken


def _first_part(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    graph = fx.Graph()
    return _part(module, graph, {node: graph.placeholder(node.name) for node in inputs}, nodes, outputs, "forward")


def _second_part(
    module: fx.GraphModule, inputs: Sequence[fx.Node | None], nodes: Sequence[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    """Return a module of some nodes of a graph, which takes a list of its inputs; None is one that no node reads."""
    graph = fx.Graph()
    taken = graph.call_function(_taken, (graph.placeholder("inputs"),))
    copies = {
        node: graph.call_function(operator.getitem, (taken, index)) for index, node in enumerate(inputs) if node is not None
    }
    return _part(module, graph, copies, nodes, outputs, "backward")


def _part(
    module: fx.GraphModule,
    graph: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[Any],
    name: str,
) -> fx.GraphModule:
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(fx.node.map_arg(output, copies.__getitem__) for output in outputs))
    graph.lint()
    return fx.GraphModule(module, graph, class_name=f"{type(module).__name__}_{name}")
