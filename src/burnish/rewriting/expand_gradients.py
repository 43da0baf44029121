"""Expansion of Gradient nodes into the operators of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from burnish.autodiff import differentiate
from burnish.errors import GradientError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, FLOATING, Builder, attribute_value, bodies, describe_node, replace_node, zeros_like
from burnish.graph.uses import copy_of, read_by
from burnish.importer.nodes import is_gradient
from burnish.operators import has_gradient
from burnish.operators.semantic import semantic_operator
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators


def expand_gradients(model: ir.Model) -> bool:
    """Replace, in place, every ``burnish.Gradient`` node (see ``burnish.importer.nodes``) by its computation.

    A Gradient is the derivative of y, or of the sum of its elements, as a function of xs and zs only; it does not continue into
    their inputs. Gradients of gradients are allowed: nodes are expanded in order.

    Args:
        model: a canonical model with sorted nodes. Its other nodes must be differentiable (``burnish.modes.bind_as_exported``).

    Raises:
        GradientError: a value is not floating-point, or an operator between xs and y has no gradient.
        UnsupportedOperatorError: a node with a branch or loop body would have to be evaluated at other values.
    """
    nodes = [node for node in model.graph if is_gradient(node)]
    for position, node in enumerate(nodes):
        if position:
            lower_what_has_no_gradient(model)
        _expand(model.graph, node)
    return bool(nodes)


def lower_what_has_no_gradient(model: ir.Model) -> None:
    """Lower, in place, the semantic operators of an earlier backward pass that have no gradient."""
    opset = model.opset_imports[""]
    kept = {node.op_type for node in model.graph if node.domain == BURNISH_DOMAIN and _is_differentiable(node, opset)}
    lower_semantic_operators(model, keep=kept | {"Gradient"})


def _is_differentiable(node: ir.Node, opset: int) -> bool:
    """True if another backward pass can go through one of our operators, or intentionally stops there."""
    operator = semantic_operator(node)
    if operator is None:
        return has_gradient(node, opset)
    return set(operator.constants) == set(operator.outputs) or (has_gradient(node, opset) and not operator.internal)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    xs, zs = (int(attribute_value(node, name, 0)) for name in ("xs", "zs"))
    count = xs + zs
    operands = [value for value in node.inputs if value is not None]
    points, named, y = operands[:count], operands[count : 2 * count], operands[-1]
    for value in (*named[:xs], y):
        if value.dtype not in FLOATING:
            raise GradientError(
                f"{describe_node(node)}: '{value.name}' is {value.dtype}, and only floating-point values have gradients. "
                "Differentiate other values"
            )
    builder = Builder(graph, before=node)
    if points != named or _depend_on_each_other(graph, named, y):
        copies = _copy_at(builder, node, dict(zip(named, points, strict=True)), y)
        named, y = [copies[value] for value in named], copies.get(y, y)
    one = builder.tensor(y)
    cotangent = builder.scalar(1.0, one)
    if one.rank != 0:
        cotangent = builder.op("Expand", cotangent, builder.op("Shape", one), like=one)
    gradients = differentiate(builder, {y: cotangent}, named[:xs])
    results = tuple(gradients[value] or zeros_like(builder.tensor(value)) for value in named[:xs])
    replace_node(node, results[: len(node.outputs)])


def _depend_on_each_other(graph: ir.Graph, named: Sequence[ir.Value], y: ir.Value) -> bool:
    """True if one of the independent values is computed from another, or listed twice."""
    between = _between(graph, named, y, cut=False)
    return len(set(named)) < len(named) or any(value.producer() in between for value in named)


def _between(graph: ir.Graph, named: Sequence[ir.Value], y: ir.Value, cut: bool) -> dict[ir.Node | None, None]:
    """Return the nodes between ``named`` and ``y``, in order; with ``cut``, paths end at the last value of ``named``."""
    sources, reached = set(named), set(named)
    dependent: list[ir.Node] = []
    for node in graph:
        if any(value in reached for value in read_by(node)):
            dependent.append(node)
            reached.update(node.outputs)
    needed, result = {y}, []
    for node in reversed(dependent):
        if any(output in needed and not (cut and output in sources) for output in node.outputs):
            result.append(node)
            needed.update(read_by(node))
    return dict.fromkeys(reversed(result))


def _copy_at(builder: Builder, gradient: ir.Node, points: Mapping[ir.Value, ir.Value], y: ir.Value) -> dict[ir.Value, ir.Value]:
    """Emit a copy of the graph from the keys of ``points`` to y, evaluated at the values of ``points``; return the copies."""
    copies = {
        value: builder.op("Identity", builder.tensor(point), like=builder.tensor(point)).value for value, point in points.items()
    }
    for node in _between(builder.graph, list(points), y, cut=True):
        assert node is not None
        if bodies(node):
            raise UnsupportedOperatorError(
                f"{describe_node(gradient)} differentiates {describe_node(node)}, which has a branch or loop body, at other "
                "values than those of the graph. Give the Gradient the values that it names as its inputs, none computed from "
                "another"
            )
        copy = copy_of(node, [None if value is None else copies.get(value, value) for value in node.inputs])
        builder.graph.insert_before(gradient, copy)
        for output, copied in zip(node.outputs, copy.outputs, strict=True):
            copies.setdefault(output, copied)
    return copies
