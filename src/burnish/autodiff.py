"""Reverse-mode differentiation over a graph. Knows no operator: every rule comes from ``burnish.operators``.

A node without a rule is written out in the operators of its function, where the standard gives one: the rule of last resort.
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
    """Emit the reverse pass of a graph behind its forward nodes.

    Args:
        builder: emits at the end of the graph that holds the forward nodes.
        cotangents: for each differentiated output, the tensor that flows in, of the output's dtype and shape.
        wrt: the values whose gradients are wanted: graph inputs, initializers or intermediate values.

    Returns:
        For each value of ``wrt`` its gradient, of its dtype and shape, or None when no output depends on it.

    Raises:
        GradientError: a node between ``wrt`` and the outputs has no gradient rule. Nodes off that path are not looked at.

    A node without a rule is written out in place where the standard says what it means by a function.
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
    """Return what a rule gives for each operand of a node; those that are left out at the end must not be wanted.

    Raises:
        GradientError: the rule returns fewer gradients than are asked for, or one of an input that the node does not have, or
            something else than tensors.
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
