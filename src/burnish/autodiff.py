"""Reverse-mode differentiation over a graph. Knows no operator: every rule comes from ``burnish.ops``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import FLOATING, Builder, Tensor, describe_node, source_of, unbroadcast
from burnish.ops import Operation, find_gradient


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
    """
    nodes = list(builder.graph)
    active = _reached_from(nodes, wrt)
    gradients: dict[ir.Value, Tensor] = {}
    for value, cotangent in cotangents.items():
        _accumulate(gradients, value, cotangent)
    for node in reversed(nodes):
        incoming = [gradients.get(output) for output in node.outputs]
        if all(cotangent is None for cotangent in incoming):
            continue
        wanted = tuple(value is not None and value in active for value in node.inputs)
        read_inside = _read_inside(node, active)
        if read_inside is not None:
            raise GradientError(_inside_body(node, read_inside))
        if not any(wanted):
            continue
        rule = find_gradient(node, builder.opset)
        if rule is None:
            raise GradientError(_no_rule(node, next(value for value in node.inputs if value is not None and value in active)))
        source = source_of(node)
        with builder.attributed(None if source is None else f"gradient of {source}"):
            result = rule(Operation(node, builder, wanted), *incoming)
            produced = result if isinstance(result, tuple) else (result,)
            for operand, is_wanted, produced_gradient in zip(node.inputs, wanted, produced, strict=False):
                if operand is not None and is_wanted and produced_gradient is not None:
                    _accumulate(gradients, operand, unbroadcast(produced_gradient, builder.tensor(operand)))
    return {value: gradients.get(value) for value in wrt}


def _reached_from(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the floating-point values that depend on ``wrt``: only these carry gradients."""
    active = set(wrt)
    for node in nodes:
        if any(value in active for value in node.inputs if value is not None) or _read_inside(node, active) is not None:
            active.update(output for output in node.outputs if output.dtype is None or output.dtype in FLOATING)
    return active


def _read_inside(node: ir.Node, active: Collection[ir.Value]) -> ir.Value | None:
    """Return a value of ``active`` that an output of a branch or loop body depends on.

    A body reads the values of the graph around it by name: they are no inputs of the node, and no rule of a node gives them
    a gradient.
    """
    for attribute in node.attributes.values():
        inner = attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else ()
        for body in (attribute.as_graph(),) if attribute.type == ir.AttributeType.GRAPH else inner:
            reached = _reached_from(body, active)
            if any(output in reached for output in body.outputs):
                read = (value for inside in body.all_nodes() for value in inside.inputs if value is not None)
                return next(value for value in (*read, *body.outputs) if value in active)
    return None


def _accumulate(gradients: dict[ir.Value, Tensor], value: ir.Value, contribution: Tensor) -> None:
    earlier = gradients.get(value)
    gradients[value] = contribution if earlier is None else earlier.builder.op("Add", earlier, contribution, like=contribution)


def _no_rule(node: ir.Node, value: ir.Value) -> str:
    return (
        f"{describe_node(node)} has no gradient rule, and '{value.name}' is differentiated through it. "
        "Differentiate only what comes after it, or an output that avoids it, or register a rule with burnish.ops.gradient"
    )


def _inside_body(node: ir.Node, value: ir.Value) -> str:
    return (
        f"{describe_node(node)} reads '{value.name}' in a branch or loop body, where no gradient flows. Differentiate only what "
        "comes after it, an output that avoids it, or a model exported without control flow, such as with Where in its place"
    )
