"""Bodies of nodes: copied, given outputs, named, and put into a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Builder, Tensor, constant_array, describe_node
from burnish.graph.operators import RANDOM_OPERATORS
from burnish.graph.uses import remove_unread_nodes
from burnish.operators.registry import Operation


def body_of(op: Operation, name: str) -> ir.Graph:
    """Return a body of a node, of which every output is a value of its own."""
    body: ir.Graph = op.attribute(name)
    body.opset_imports.update(op.builder.graph.opset_imports)
    held = {*body.inputs, *body.initializers.values(), *(output for node in body for output in node.outputs)}
    for position, output in enumerate(body.outputs):
        if output not in held:
            body.outputs[position] = Builder(body).op("Identity", Tensor(op.builder, output)).value
    return body


def copy_of_body(body: ir.Graph) -> tuple[ir.Graph, list[ir.Value]]:
    """Return a copy of a body that reads the same values of the graphs around it, without outputs; and what were its outputs."""
    copy = body.clone(allow_outer_scope_values=True)
    outputs = list(copy.outputs)
    copy.outputs.clear()
    return copy, outputs


def finish_body(op: Operation, body: ir.Graph) -> None:
    """Remove from a body, whose outputs are set, what nothing reads.

    Raises:
        GradientError: it computes random draws of the forward body again, which would be others.
    """
    remove_unread_nodes(body)
    for node in body.all_nodes():
        if node.domain == "" and node.op_type in RANDOM_OPERATORS and not _is_inference(node):
            raise GradientError(
                f"{describe_node(node)} draws random numbers in a body of {op}, and the gradient, which computes that body "
                "again, would draw others. Set it to inference, move it out of the body, or train with burnish.compile, where "
                "draws come from a key"
            )


def _is_inference(node: ir.Node) -> bool:
    """Whether a node is a Dropout that passes its operand on."""
    if node.op_type != "Dropout":
        return False
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    training = constant_array(node.inputs[2])
    return training is not None and not training.any()


def return_from(builder: Builder, tensors: Sequence[Tensor]) -> None:
    """Make tensors the outputs of the body under construction: each a value that one of its nodes makes, and no other output."""
    body = builder.graph
    for tensor in tensors:
        producer = tensor.value.producer()
        is_taken = producer is None or producer.graph is not body or tensor.value.is_graph_output()
        body.outputs.append(builder.op("Identity", tensor, like=tensor).value if is_taken else tensor.value)


def emit_with_bodies(
    builder: Builder, op_type: str, inputs: Sequence[Tensor | None], bodies: Mapping[str, ir.Graph], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Emit a node with bodies, and name what they hold after it.

    Args:
        builder, op_type, inputs: as ``Builder.op`` takes them.
        bodies: the graphs, by attribute.
        like: for each output, a tensor of its dtype and shape.
    """
    attributes: dict[str, Any] = dict(bodies)
    results = builder.op(op_type, *inputs, outputs=len(like), **attributes)
    results = results if isinstance(results, tuple) else (results,)
    for result, pattern in zip(results, like, strict=True):
        result.value.type, result.value.shape = (
            pattern.value.type,
            None if pattern.shape is None else ir.Shape(pattern.shape.dims),
        )
    number = 0
    for body in bodies.values():
        for graph in (body, *body.subgraphs()):
            for domain, version in graph.opset_imports.items():
                builder.graph.opset_imports.setdefault(domain, version)
            for value in (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)):
                if value.name != "":
                    value.name = f"{results[0].name}/{number}"
                    number += 1
    return results


def added_up(pairs: Sequence[tuple[ir.Value, Tensor]]) -> dict[ir.Value, Tensor]:
    """Return the cotangent of each value, where several outputs may be one value."""
    total: dict[ir.Value, Tensor] = {}
    for value, cotangent in pairs:
        total[value] = total[value] + cotangent if value in total else cotangent
    return total
