"""Fusion of softmax cross-entropy over class indices: one kernel for its sum, one for the gradient.

The loss reaches the graph as ``LogSoftmax``, the element that each label picks, and a sum in which ignored labels count as 0. Its
gradient scatters the sum's cotangent over zeros, and goes through the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, replace_node
from burnish.graph.uses import only_user, remove_unread

CLASS_AXIS = 1


@dataclass(frozen=True)
class _Terms:
    """The forward pass of a loss.

    Attributes:
        labels, ignored: class indices ``[N]``, and the one that does not count.
        is_ignored: where they are that one.
        places: the labels with a class axis, 0 in place of ignored ones.
        total: computes the sum of the terms.
        picked: what is between the logarithms and the sum.
    """

    labels: ir.Value
    ignored: int
    is_ignored: ir.Value
    places: ir.Value
    total: ir.Node
    picked: tuple[ir.Node, ...]


def fuse_cross_entropy(graph: ir.Graph) -> None:
    """Replace the loss by ``burnish.FusedCrossEntropy`` and ``burnish.FusedCrossEntropyGrad``, in place; of float32 ``[N, C]``.

    Class weights and smoothing are left as they are, and so is a loss whose logarithms are read elsewhere.
    """
    fused = False
    for node in list(graph):
        if node.op_type == "LogSoftmax" and node.domain == "" and node.outputs[0].dtype == ir.DataType.FLOAT:
            fused |= _fuse(graph, node)
    if fused:
        graph.sort()


def _fuse(graph: ir.Graph, softmax: ir.Node) -> bool:
    logits, log_p = softmax.inputs[0], softmax.outputs[0]
    if logits is None or log_p.shape is None or len(log_p.shape) != 2 or log_p.is_graph_output():
        return False
    if int(attribute_value(softmax, "axis", -1)) % 2 != CLASS_AXIS:
        return False
    users = {user for user, _ in log_p.uses()}
    gathers = [user for user in users if _is(user, "GatherElements")]
    exponentials = [user for user in users if _is(user, "Exp")]
    shapes = [user for user in users if _is(user, "Shape")]
    if len(gathers) != 1 or len(exponentials) > 1 or len(users) != 1 + len(exponentials) + len(shapes):
        return False
    terms = _terms(gathers[0])
    if terms is None:
        return False
    gradient = None
    if exponentials:
        gradient = _gradient(exponentials[0], terms)
        if gradient is None:
            return False
    builder = Builder(graph, before=softmax)
    operands = [builder.tensor(logits), builder.tensor(terms.labels)]
    results = builder.op("FusedCrossEntropy", *operands, domain=BURNISH_DOMAIN, outputs=3, ignored=terms.ignored)
    for result in results:
        result.value.type = log_p.type
    for result in results[:2]:
        result.value.shape = ir.Shape([])
    results[2].value.shape = ir.Shape([log_p.shape[0], 2])
    if gradient is not None:
        last, flow, inside = gradient
        builder = Builder(graph, before=last)
        given = [*operands, results[2], builder.tensor(flow)]
        found = builder.op("FusedCrossEntropyGrad", *given, domain=BURNISH_DOMAIN, like=operands[0], ignored=terms.ignored)
        replace_node(last, found)
        remove_unread(graph, *inside)
    for node in shapes:  # the logits have it too
        node.replace_input_with(0, logits)
    for total, between in _counts(terms.is_ignored):
        replace_node(total, builder.tensor(results[1].value))
        remove_unread(graph, *between)
    replace_node(terms.total, results[0])
    equal = terms.is_ignored.producer()
    remove_unread(graph, *terms.picked, softmax, *([] if equal is None else [equal]))
    return True


def _terms(gather: ir.Node) -> _Terms | None:
    """The sum of what labels pick, -log p[y], with 0 where they are ignored."""
    places = gather.inputs[1]
    index = None if places is None else _made_by(places, "Unsqueeze")
    if places is None or index is None or _axes(index) != [CLASS_AXIS] or attribute_value(gather, "axis", 0) != CLASS_AXIS:
        return None
    chosen = _made_by(index.inputs[0], "Where")
    if chosen is None or _number(chosen.inputs[1]) != 0:
        return None
    is_ignored, labels = chosen.inputs[0], chosen.inputs[2]
    equal = _made_by(is_ignored, "Equal")
    ignored = None if equal is None else _number(equal.inputs[1])
    if (
        is_ignored is None
        or labels is None
        or labels.dtype != ir.DataType.INT64
        or equal is None
        or equal.inputs[0] is not labels
    ):
        return None
    if ignored is None or labels.shape is None or len(labels.shape) != 1:
        return None
    squeezed = only_user(gather.outputs[0], "Squeeze")
    negated = None if squeezed is None or _axes(squeezed) != [CLASS_AXIS] else only_user(squeezed.outputs[0], "Neg")
    if squeezed is None or negated is None:
        return None
    counted = [user for user, _ in negated.outputs[0].uses()]
    if (
        len(counted) != 1
        or negated.outputs[0].is_graph_output()
        or not _is_zero_where(counted[0], is_ignored, negated.outputs[0])
    ):
        return None
    totals = [user for user, _ in counted[0].outputs[0].uses() if not _is(user, "Shape")]
    if len(totals) != 1 or counted[0].outputs[0].is_graph_output() or not _is_sum_of_all(totals[0]):
        return None
    return _Terms(labels, int(ignored), is_ignored, places, totals[0], (gather, squeezed, negated, counted[0], index, chosen))


def _gradient(exponential: ir.Node, terms: _Terms) -> tuple[ir.Node, ir.Value, list[ir.Node]] | None:
    """The node that computes the gradient of the logits, s - exp(log p) sum(s); the cotangent in it; and what is between."""
    product = only_user(exponential.outputs[0], "Mul")
    last = None if product is None else only_user(product.outputs[0], "Sub")
    if product is None or last is None or last.inputs[1] is not product.outputs[0]:
        return None
    other = product.inputs[1] if product.inputs[0] is exponential.outputs[0] else product.inputs[0]
    total = _made_by(other, "ReduceSum")
    scatter = _made_by(last.inputs[0], "ScatterElements")
    if total is None or scatter is None or total.inputs[0] is not scatter.outputs[0] or _axes(total) != [CLASS_AXIS]:
        return None
    if not attribute_value(total, "keepdims", 1) or len(total.outputs[0].uses()) != 1 or len(scatter.outputs[0].uses()) != 2:
        return None
    if attribute_value(scatter, "axis", 0) != CLASS_AXIS or attribute_value(scatter, "reduction", "none") not in ("add", "none"):
        return None
    base, places, addend = scatter.inputs
    zeros = _made_by(base, "ConstantOfShape")
    if places is not terms.places or zeros is None or not _fills_with_zeros(zeros):
        return None
    on_axis = _made_by(addend, "Reshape") or _made_by(addend, "Unsqueeze")
    negated = None if on_axis is None else _made_by(on_axis.inputs[0], "Neg")
    masked = None if negated is None else _made_by(negated.inputs[0], "Where")
    if on_axis is None or negated is None or masked is None:
        return None
    spread = _made_by(masked.inputs[2], "Expand")
    if spread is None or not _is_zero_where(masked, terms.is_ignored, spread.outputs[0]):
        return None
    flow = spread.inputs[0]
    if flow is None or flow.dtype != ir.DataType.FLOAT or flow.shape is None or len(flow.shape) != 0:
        return None
    if any(node.outputs[0].is_graph_output() for node in (exponential, product, total, scatter)):
        return None
    between = [product, exponential, total, scatter, zeros, on_axis, negated, masked, spread]
    shapes = [node.inputs[index] for node, index in ((zeros, 0), (spread, 1))]
    producers = [None if value is None else value.producer() for value in shapes]
    return last, flow, between + [producer for producer in producers if producer is not None]


def _counts(is_ignored: ir.Value) -> list[tuple[ir.Node, list[ir.Node]]]:
    """The nodes that count, in float32, the labels that are not ignored, and what is between."""
    found = []
    for node, _ in is_ignored.uses():
        cast = only_user(node.outputs[0], "Cast") if _is(node, "Not") else None
        if cast is not None and cast.outputs[0].dtype == ir.DataType.FLOAT:
            total = only_user(cast.outputs[0], "ReduceSum")
            if total is not None and _is_sum_of_all(total):
                found.append((total, [cast, node]))
    return found


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    producer = None if value is None else value.producer()
    return producer if producer is not None and _is(producer, op_type) else None


def _number(value: ir.Value | None) -> float | None:
    array = None if value is None else constant_array(value)
    return array.item() if array is not None and array.size == 1 else None


def _axes(node: ir.Node) -> list[int] | None:
    """The axes of a node that takes them as its second operand; of tensors of rank 2, counted from the front."""
    array = constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    return None if array is None else [int(axis) % 2 for axis in np.reshape(array, -1)]


def _is_zero_where(node: ir.Node, condition: ir.Value, otherwise: ir.Value) -> bool:
    return _is(node, "Where") and node.inputs[0] is condition and _number(node.inputs[1]) == 0 and node.inputs[2] is otherwise


def _is_sum_of_all(node: ir.Node) -> bool:
    if not _is(node, "ReduceSum") or attribute_value(node, "keepdims", 1) or attribute_value(node, "noop_with_empty_axes", 0):
        return False
    return len(node.inputs) == 1 or node.inputs[1] is None


def _fills_with_zeros(node: ir.Node) -> bool:
    value = attribute_value(node, "value", None)
    return value is None or not np.any(value.numpy())
