"""Reverse-mode differentiation over a graph. Knows no operator: every rule comes from ``burnish.operators``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Builder, Tensor, describe_node, quantization_of, source_of, unbroadcast
from burnish.graph.uses import operands_of
from burnish.operators import Gradients, Operation, find_gradient
from burnish.operators.functions import write_out_functions
from burnish.operators.registry import GradientRule
from burnish.operators.semantic import reached_from


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
