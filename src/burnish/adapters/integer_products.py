"""Integer products with adapters: MatMulInteger and ConvInteger are rewritten in floating point.

ONNX Runtime's dynamic quantization writes a product as ``DynamicQuantizeLinear``, ``MatMulInteger``, ``Cast`` and ``Mul`` by both
scales. DequantizeLinear of both factors and MatMul give the same numbers, and an adapter can be added to them and merged.
Products without an adapter stay integer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, Builder, Names, Tensor, add_initializer, constant_array, replace_node
from burnish.graph.names import plain_name
from burnish.graph.uses import only_user, producer_of, remove_unread

PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}


@dataclass(frozen=True)
class _Product:
    """A product of integers with its rescaling.

    Attributes:
        node: MatMulInteger or ConvInteger.
        last: the Mul that computes the floating-point result.
        scale: scale of the activation.
        weight_scale: scale of the weight, one number or one per output.
    """

    node: ir.Node
    last: ir.Node
    scale: ir.Value
    weight_scale: np.ndarray


def write_integer_products(model: ir.Model, outputs: Callable[[ir.Model], Iterable[str]]) -> None:
    """Rewrite the integer products that get adapters in floating point, in place.

    Args:
        model: a canonical model.
        outputs: returns the names of values that get adapters, given a copy in which all products are rewritten.
    """
    if next(_products(model.graph), None) is None:
        return
    trial = model.clone()
    _write(trial.graph, list(_products(trial.graph)))
    wanted = set(outputs(trial))
    _write(model.graph, [product for product in _products(model.graph) if product.last.outputs[0].name in wanted])


def _write(graph: ir.Graph, products: Collection[_Product]) -> None:
    names = Names.of(graph)
    for product in products:
        node, builder = product.node, Builder(graph, before=product.last)
        x, weight = (builder.tensor(value) for value in node.inputs[:2] if value is not None)
        zeros = [builder.tensor(value) if value is not None else None for value in (*node.inputs[2:4], None, None)[:2]]
        axis = -1 if node.op_type == "MatMulInteger" else 0
        scales = product.weight_scale.reshape(()) if product.weight_scale.size == 1 else product.weight_scale.reshape(-1)
        held = add_initializer(graph, names.take(f"{node.inputs[1].name}_factor"), scales)  # type: ignore[union-attr]
        factors = (
            builder.op("DequantizeLinear", x, _scalar(builder.tensor(product.scale)), _scalar(zeros[0])),
            builder.op("DequantizeLinear", weight, builder.tensor(held), _zero_like(zeros[1], scales), axis=axis),
        )
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        result = builder.op(PRODUCTS[node.op_type], *factors, **attributes)
        made = result.value.producer()
        assert made is not None
        cast, output = only_user(node.outputs[0], "Cast"), product.last.outputs[0].name
        replace_node(product.last, result)
        result.value.name = output
        made.name = names.take(plain_name(node.name or PRODUCTS[node.op_type]))
        made.metadata_props.update(node.metadata_props)
        remove_unread(graph, cast, node)


def _scalar(number: Tensor | None) -> Tensor | None:
    if number is None or not number.rank:
        return number
    return number.builder.op("Reshape", number, number.builder.integers([]))


def _zero_like(zero: Tensor | None, scales: np.ndarray) -> Tensor | None:
    """Return a zero point in the shape of the scales, as DequantizeLinear requires."""
    array = None if zero is None else zero.array
    if zero is None or array is None or not array.any():
        return None
    return zero.builder.constant(np.broadcast_to(array.reshape(-1 if array.size > 1 else ()), scales.shape).copy())


def _products(graph: ir.Graph) -> Iterator[_Product]:
    for node in graph:
        if node.domain == "" and node.op_type in PRODUCTS and (product := _product(node)) is not None:
            yield product


def _product(node: ir.Node) -> _Product | None:
    x, weight = node.inputs[:2]
    integers = None if weight is None else constant_array(weight)
    scale, zero = _grid(x)
    cast = only_user(node.outputs[0], "Cast")
    of_x, of_weight = (*node.inputs[2:4], None, None)[:2]
    zeros = None if of_weight is None else constant_array(of_weight)
    if integers is None or scale is None or zero is not of_x or cast is None or cast.outputs[0].dtype not in FLOATING:
        return None
    if integers.ndim < 2 or (node.op_type == "MatMulInteger" and integers.ndim != 2) or (of_weight is not None and zeros is None):
        return None
    width = integers.shape[-1 if node.op_type == "MatMulInteger" else 0]  # number of outputs
    value, last, factors, has_scale = cast.outputs[0], cast, None, False
    while factors is None or not has_scale:
        mul = only_user(value, "Mul")
        other = None if mul is None else next((operand for operand in mul.inputs if operand is not value), None)
        found = None if other is None else _factors(other, scale)
        if mul is None or found is None or (found[1] and has_scale):
            return None
        factors = factors if found[0] is None else found[0] if factors is None else factors * found[0]
        value, last, has_scale = mul.outputs[0], mul, has_scale or found[1]
    place = -1 if node.op_type == "MatMulInteger" else 1 - integers.ndim
    is_by_output = factors.size == 1 or (factors.size == width and factors.ndim >= -place and factors.shape[place] == width)
    return _Product(node, last, scale, factors) if is_by_output and (zeros is None or zeros.size in (1, width)) else None


def _grid(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    node = producer_of(value, "DynamicQuantizeLinear", "QuantizeLinear")
    if node is None:
        return None, None
    if node.op_type == "DynamicQuantizeLinear":
        return node.outputs[1], node.outputs[2]
    scale, zero = (*node.inputs[1:3], None)[:2]
    is_one = scale is not None and scale.shape is not None and scale.shape.numpy() in ((), (1,))
    return (scale, zero) if is_one else (None, None)


def _factors(value: ir.Value, scale: ir.Value) -> tuple[np.ndarray | None, bool] | None:
    """Return the constant in a product of scales, and True if the activation's scale is in it; None for other products."""
    constant: np.ndarray | None = None
    has_scale = False
    pending = [value]
    while pending:
        operand = pending.pop()
        array = constant_array(operand)
        if operand is scale:
            if has_scale:
                return None
            has_scale = True
        elif array is not None:
            constant = array if constant is None else constant * array
        elif (mul := producer_of(operand, "Mul")) is not None:
            pending.extend(each for each in mul.inputs if each is not None)
        else:
            return None
    return constant, has_scale
