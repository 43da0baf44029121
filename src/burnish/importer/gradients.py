"""The standard's Gradient operator, bound to the values that it names.

``ai.onnx.preview.training.Gradient`` names what it differentiates in text attributes, which no rewrite of the graph keeps up
to date. In the canonical model the node reads those values instead, as ``burnish.Gradient``::

    points (the node's own inputs), xs, zs, y -> the gradient of y with respect to each of xs

``xs`` and ``zs`` hold how many values of each kind there are.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, TRAINING_DOMAIN, attribute_value, describe_node, remove_node, replace_uses

_REMEDY = "Export the model again"


def is_gradient(node: ir.Node) -> bool:
    """Whether a node is a gradient inside the model."""
    return node.op_type == "Gradient" and node.domain == BURNISH_DOMAIN


def bind_gradients(model: ir.Model) -> None:
    """Replace, in place, the names in the Gradient nodes of the main graph by the values that have them.

    Raises:
        ModelError: a name that no value has, another number of inputs than of names, or a value that is differentiated and
            depends on its own gradient.
    """
    graph = model.graph
    nodes = [node for node in graph if node.domain == TRAINING_DOMAIN and node.op_type == "Gradient"]
    if not nodes:
        return
    values = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    values |= {output.name: output for node in graph for output in node.outputs if output.name}
    for node in nodes:
        _bind(node, values)
    graph.opset_imports[BURNISH_DOMAIN] = 1
    try:
        # Nothing in the standard puts the node after the value that it names.
        graph.sort()
    except ValueError as error:
        raise ModelError(
            f"{describe_node(nodes[0])}: what a Gradient of the model differentiates depends on that gradient. {_REMEDY}"
        ) from error


def refuse_gradients(model: ir.Model, what: str) -> None:
    """Raise UnsupportedOperatorError for a canonical model with a Gradient: its layers would change their mode under it."""
    for node in model.graph:
        if is_gradient(node):
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is a gradient inside the model, which {what} does not take as it is. Give "
                "burnish.lower(model) in its place, in which it is standard operators"
            )


def stand_in_for_gradients(graph: ir.Graph) -> None:
    """Put, in place, an Identity of its point where each gradient is: the standard's inference then gives its dtype and shape."""
    for node in [node for node in graph if is_gradient(node)]:
        for point, output in zip(node.inputs[: len(node.outputs)], node.outputs, strict=True):
            if not output.name:
                continue
            name, output.name = output.name, None
            copy = ir.node("Identity", [point])
            copy.outputs[0].name = name
            graph.insert_before(node, copy)
            replace_uses(output, copy.outputs[0])
        remove_node(node)


def _bind(node: ir.Node, values: dict[str | None, ir.Value]) -> None:
    xs, zs = (tuple(attribute_value(node, name, ())) for name in ("xs", "zs"))
    names = (*xs, *zs, attribute_value(node, "y", ""))
    unknown = next((name for name in names if name not in values), None)
    if unknown is not None:
        raise ModelError(
            f"{describe_node(node)} differentiates '{unknown}', a value that the model's graph does not have. {_REMEDY}"
        )
    count = len(xs) + len(zs)
    if len(node.inputs) != count or any(value is None for value in node.inputs):
        raise ModelError(
            f"{describe_node(node)} has {len(node.inputs)} inputs, and names {count} values in xs and zs, which need one "
            f"each. {_REMEDY}"
        )
    if len(node.outputs) > len(xs):
        raise ModelError(f"{describe_node(node)} has {len(node.outputs)} outputs, and names {len(xs)} values in xs. {_REMEDY}")
    node.domain = BURNISH_DOMAIN
    node.attributes.clear()
    node.attributes["xs"] = ir.AttrInt64("xs", len(xs))
    node.attributes["zs"] = ir.AttrInt64("zs", len(zs))
    node.resize_inputs(count + len(names))
    for index, name in enumerate(names, start=count):
        node.replace_input_with(index, values[name])
