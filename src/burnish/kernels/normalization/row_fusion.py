"""Fuse normalization over trailing axes, with the scale and bias of a layer if nothing else reads the normalized rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, remove_node, replace_uses
from burnish.graph.uses import remove_unread
from burnish.kernels.normalization import FUSED_STANDARDIZE, FUSED_STANDARDIZE_GRAD
from burnish.operators.normalization.standardize import ROOT_MEAN_SQUARE_NORMALIZE, STANDARDIZE, STANDARDIZE_GRAD


@dataclass(frozen=True)
class _Gradient:
    """The gradient of a layer: ``node`` of its rows, and the sums over rows if there are any."""

    node: ir.Node
    flow: ir.Value
    parameters: dict[str, ir.Value]


def fuse_normalization(graph: ir.Graph) -> bool:
    """Replace Standardize, RootMeanSquareNormalize and StandardizeGrad of float32 by kernels, in place.

    Sort the graph afterwards: a gradient may come before its operands.
    """
    changed = False
    for node in list(graph):
        if (STANDARDIZE.is_of(node) or ROOT_MEAN_SQUARE_NORMALIZE.is_of(node)) and _is_single(node):
            _fuse_layer(graph, node)
            changed = True
    for node in list(graph):
        if STANDARDIZE_GRAD.is_of(node) and _is_single(node):
            _replace_projection(graph, node)
            changed = True
    return changed


def _is_single(node: ir.Node) -> bool:
    value = node.inputs[0]
    return value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None


def _fuse_layer(graph: ir.Graph, node: ir.Node) -> None:
    centered = STANDARDIZE.is_of(node)
    rows, inverse = node.outputs[0], node.outputs[-1]
    axis = int(node.attributes["axis"].as_int())
    found = _layer(rows, inverse, axis)
    last, scale, bias, gradients = (rows, None, None, []) if found is None else found
    x = node.inputs[0]
    assert x is not None
    maker = last.producer()
    assert maker is not None
    builder = Builder(graph, before=maker)
    attributes = {"axis": axis, "offset": attribute_value(node, "offset", 0.0), "centered": int(centered)}
    operands = [builder.tensor(x), *(None if value is None else builder.tensor(value) for value in (scale, bias))]
    results = FUSED_STANDARDIZE.emit(
        *operands,
        epsilon=attribute_value(node, "epsilon", 1e-5),
        **attributes,
    )
    y, mean, shift, scaling = (result.value for result in results)
    y.type, y.shape = last.type, last.shape
    for statistic in (mean, shift, scaling):
        statistic.type, statistic.shape = inverse.type, inverse.shape
    for gradient in gradients:
        _fuse_gradient(graph, gradient, x, (mean, shift, scaling), scale, attributes)
    if centered:
        replace_uses(node.outputs[1], mean)
    replace_uses(inverse, scaling)
    replace_uses(last, y)
    remove_unread(graph, maker, node)


Layer = tuple[ir.Value, ir.Value, ir.Value | None, list[_Gradient]]


def _layer(rows: ir.Value, inverse: ir.Value, axis: int) -> Layer | None:
    """Return scale and bias of a standardization's layer, and its gradients; None if rows have other readers."""
    scaled: list[tuple[ir.Node, ir.Value]] = []
    products: list[tuple[ir.Value, ir.Value]] = []  # (the factor of the rows, the sum of the products over the other axes)
    projections: list[ir.Node] = []
    if rows.is_graph_output() or rows.shape is None:
        return None
    for user, position in rows.uses():
        if STANDARDIZE_GRAD.is_of(user) and position == 1 and user.inputs[2] is inverse:
            projections.append(user)
            continue
        if user.op_type != "Mul" or user.domain != "":
            return None
        other = user.inputs[1 - position]
        assert other is not None
        total = _sum_over_rows(user.outputs[0], axis)
        if _is_per_column(other, rows, axis):
            scaled.append((user, other))
        elif total is not None and len(user.outputs[0].uses()) == 1 and not user.outputs[0].is_graph_output():
            products.append((other, total))
        else:
            return None
    if len(scaled) != 1:
        return None
    node, scale = scaled[0]
    last, bias = node.outputs[0], None
    users = list(last.uses())
    if len(users) == 1 and users[0][0].op_type == "Add" and users[0][0].domain == "" and not last.is_graph_output():
        candidate = users[0][0].inputs[1 - users[0][1]]
        if candidate is not None and _is_per_column(candidate, rows, axis):
            last, bias = users[0][0].outputs[0], candidate
    gradients = []
    for projection in projections:
        gradient = _gradient(projection, scale, products, axis)
        if gradient is None:
            return None
        gradients.append(gradient)
    taken = {id(gradient.parameters.get("scale")) for gradient in gradients}
    if any(id(total) not in taken for _, total in products):
        return None
    return last, scale, bias, gradients


def _gradient(projection: ir.Node, scale: ir.Value, products: list[tuple[ir.Value, ir.Value]], axis: int) -> _Gradient | None:
    scaled = projection.inputs[0]
    assert scaled is not None
    maker = scaled.producer()
    if maker is None or maker.op_type != "Mul" or maker.domain != "" or scale not in maker.inputs or scaled.is_graph_output():
        return None
    flow = maker.inputs[1] if maker.inputs[0] is scale else maker.inputs[0]
    if flow is None or flow.shape != scaled.shape or len(scaled.uses()) != 1:
        return None
    parameters = {}
    for other, total in products:
        if other is flow:
            parameters["scale"] = total
    bias = _sum_over_rows(flow, axis)
    if bias is not None:
        parameters["bias"] = bias
    return _Gradient(projection, flow, parameters)


def _fuse_gradient(
    graph: ir.Graph,
    gradient: _Gradient,
    x: ir.Value,
    statistics: tuple[ir.Value, ...],
    scale: ir.Value | None,
    attributes: dict[str, Any],
) -> None:
    builder = Builder(graph, before=gradient.node)
    assert scale is not None
    operands = [builder.tensor(value) for value in (gradient.flow, x, *statistics, scale)]
    results = FUSED_STANDARDIZE_GRAD.emit(
        *operands,
        parameters=int(bool(gradient.parameters)),
        **attributes,
    )
    outputs = {"scale": results[1].value, "bias": results[2].value}
    dx = gradient.node.outputs[0]
    results[0].value.type, results[0].value.shape = dx.type, dx.shape
    replace_uses(dx, results[0].value)
    for result in outputs.values():
        result.type, result.shape = scale.type, scale.shape
    for name, value in gradient.parameters.items():
        replace_uses(value, outputs[name])
    makers = [gradient.node.inputs[0], *gradient.parameters.values()]
    producers = [None if value is None else value.producer() for value in makers]
    remove_node(gradient.node)
    remove_unread(graph, *producers)


def _replace_projection(graph: ir.Graph, node: ir.Node) -> None:
    builder = Builder(graph, before=node)
    flow, rows, inverse = (builder.tensor(value) for value in node.inputs if value is not None)
    results = FUSED_STANDARDIZE_GRAD.emit(
        flow,
        rows,
        None,
        None,
        inverse,
        axis=node.attributes["axis"].as_int(),
        offset=attribute_value(node, "offset", 0.0),
        centered=attribute_value(node, "centered", 1),
        parameters=0,
    )
    dx = node.outputs[0]
    results[0].value.type, results[0].value.shape = dx.type, dx.shape
    replace_uses(dx, results[0].value)
    remove_node(node)


def _is_per_column(value: ir.Value, rows: ir.Value, axis: int) -> bool:
    return value.shape is not None and rows.shape is not None and list(value.shape.dims) == list(rows.shape.dims[axis:])


def _sum_over_rows(value: ir.Value, axis: int) -> ir.Value | None:
    """Return the sum of a value over all axes before ``axis``, if the graph has it."""
    rank = 0 if value.shape is None else len(value.shape)
    for user, _ in value.uses():
        if user.op_type != "ReduceSum" or user.domain != "" or attribute_value(user, "keepdims", 1) or len(user.inputs) < 2:
            continue
        axes = constant_array(user.inputs[1])
        if axes is not None and sorted(int(number) % rank for number in axes) == list(range(rank + axis)):
            return user.outputs[0]
    return None
