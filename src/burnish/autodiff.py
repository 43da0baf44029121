"""Reverse-mode differentiation of a graph. It knows no operators: every gradient rule comes from ``burnish.operators``.

A node without a rule is replaced by its ONNX function body, if the standard defines one, and differentiated through that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Builder, Names, Tensor, bodies, describe_node, quantization_of, source_of, unbroadcast
from burnish.graph.function_bodies import has_function, standard_function, write_out
from burnish.graph.uses import copy_of, operands_of, read_by
from burnish.operators import Gradients, Operation, find_gradient
from burnish.operators.registry import GradientRule, has_gradient
from burnish.operators.semantic import differentiable_outputs, reached_from


def differentiate(
    builder: Builder, cotangents: Mapping[ir.Value, Tensor], wrt: Sequence[ir.Value]
) -> dict[ir.Value, Tensor | None]:
    """Append the backward pass of a graph after its forward nodes.

    Nodes without a gradient rule are first replaced in place by their function bodies, if the standard defines them.

    Args:
        builder: builder that appends to the graph of the forward nodes.
        cotangents: the incoming gradient of each differentiated output, with the output's dtype and shape.
        wrt: values to differentiate with respect to: graph inputs, initializers or intermediate values.

    Returns:
        The gradient of each value of ``wrt``, with its dtype and shape, or None if no output depends on it.

    Raises:
        GradientError: a node between ``wrt`` and the outputs has no gradient rule. Other nodes are not checked.
    """
    write_out_functions(builder.graph, wrt, cotangents)
    nodes = list(builder.graph)
    active = reached_from(nodes, wrt)
    gradients: dict[ir.Value, Tensor] = {}
    for value, cotangent in cotangents.items():
        _accumulate(gradients, value, cotangent)
    for node in reversed(nodes):
        incoming = [gradients.get(output) for output in node.outputs]
        if all(cotangent is None for cotangent in incoming):
            continue
        operands = operands_of(node)
        wanted = tuple(value is not None and value in active for value in operands)
        if not any(wanted):
            continue
        rule = find_gradient(node, builder.opset)
        if rule is None:
            raise GradientError(_no_rule(node, next(value for value in operands if value is not None and value in active)))
        source = source_of(node)
        with builder.attributed(None if source is None else f"gradient of {source}"):
            produced = _checked(node, rule, wanted, rule(Operation(node, builder, wanted, differentiate), *incoming))
            for operand, is_wanted, produced_gradient in zip(operands, wanted, produced, strict=True):
                if operand is not None and is_wanted and produced_gradient is not None:
                    _accumulate(gradients, operand, unbroadcast(produced_gradient, builder.tensor(operand)))
    return {value: gradients.get(value) for value in wrt}


def _checked(node: ir.Node, rule: GradientRule, wanted: Sequence[bool], result: Gradients) -> tuple[Tensor | None, ...]:
    """Return the gradient of each operand from a rule's result, which may omit unneeded operands at the end.

    Raises:
        GradientError: the rule returned too few gradients, a gradient for an input that the node lacks, or no tensors.
    """
    name = getattr(rule, "__qualname__", rule)
    produced = (None,) * len(wanted) if result is None else result if isinstance(result, tuple) else (result,)
    if not all(gradient is None or isinstance(gradient, Tensor) for gradient in produced):
        raise GradientError(
            f"the gradient rule of {describe_node(node)} returned {result!r}: let it ({name}, registered with "
            "burnish.operators.gradient) return a tensor, or a tuple with a tensor or None for each input"
        )
    missing = next((index for index in range(len(produced), len(wanted)) if wanted[index]), None)
    if missing is not None:
        operand = operands_of(node)[missing]
        raise GradientError(
            f"the gradient rule of {describe_node(node)} returned {len(produced)} of {len(wanted)} gradients, and none for its "
            f"input {missing}, '{'' if operand is None else operand.name}', which is differentiated: let the rule ({name}, "
            "registered with burnish.operators.gradient) return one for each input, None where there is none"
        )
    if any(gradient is not None for gradient in produced[len(wanted) :]):
        raise GradientError(
            f"the gradient rule of {describe_node(node)} returned {len(produced)} gradients, and the node has {len(wanted)} "
            f"inputs: let the rule ({name}, registered with burnish.operators.gradient) return one for each input"
        )
    return (*produced, *(None for _ in wanted))[: len(wanted)]


def _accumulate(gradients: dict[ir.Value, Tensor], value: ir.Value, contribution: Tensor) -> None:
    earlier = gradients.get(value)
    gradients[value] = contribution if earlier is None else earlier.builder.op("Add", earlier, contribution, like=contribution)


def _no_rule(node: ir.Node, value: ir.Value) -> str:
    if quantized := quantization_of(node):
        return f"'{value.name}' is differentiated through an operator without a gradient: {quantized}"
    others = "" if node.domain == "" else f"(domain='{node.domain}'), or export the model without this operator of a runtime"
    return (
        f"{describe_node(node)} has no gradient rule, and '{value.name}' is differentiated through it. "
        "Differentiate only what comes after it, or an output that avoids it, or register a rule with burnish.operators.gradient"
        f"{others}"
    )


def write_out_functions(graph: ir.Graph, wrt: Collection[ir.Value], of: Collection[ir.Value]) -> None:
    """Inline, in place, the functions of nodes that lie on a gradient path and have no gradient rule.

    Repeats until the inlined bodies need no further inlining. Output values keep their identity; other nodes are unchanged.

    Args:
        graph: the forward graph.
        wrt: values to differentiate with respect to.
        of: values to differentiate.
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
    """True if a node is differentiable, by its own rule or by the rules of the operators in its function body."""
    if has_gradient(node, opset):
        return True
    if not _is_candidate(node, opset):
        return False
    # Inlining happens in a graph of its own, so that the node itself stays.
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
    """Return the nodes, in subgraphs too, that lie between ``wrt`` and ``of``, in reverse order."""
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
    """Yield the nodes on a gradient path through the subgraphs of a node: from loop-carried and from captured values."""
    for body in bodies(node):
        entering = [value for value in body.inputs if _carries(value)]
        yield from path(body, {*active, *entering}, body.outputs)


def _is_candidate(node: ir.Node, opset: int) -> bool:
    """True if a node has a function body, no gradient rule, and a floating-point output."""
    return node.domain == "" and has_function(node.op_type, opset) and not has_gradient(node, opset) and _has_floats(node)


def _has_floats(node: ir.Node) -> bool:
    return any(True for _ in differentiable_outputs(node))


def _carries(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()
