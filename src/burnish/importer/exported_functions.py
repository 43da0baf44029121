"""``atan2``, ``sinc``, ``xlogy`` and ``cosine_similarity`` of PyTorch, which its exporters write with 0/0 in them.

They get a form that is the same everywhere else, and has PyTorch's value and gradient there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, constant_array, replace_node
from burnish.graph.annotations import SUBGRADIENT, WHOLE
from burnish.graph.matching import Either, Match, Node, Number, Variable, find_match
from burnish.graph.uses import producer_of, remove_unread

LONGEST_EPSILON = 1e-6
"""Beyond it, what the older exporter makes of ``cosine_similarity`` is another function that one would notice."""


def restore_exported_functions(model: ir.Model) -> bool:
    """Write, in place, such functions of a model that PyTorch exported without 0/0.

    Returns:
        Whether there was any.
    """
    if (model.producer_name or "").lower() != "pytorch":
        return False
    restored = False
    for graph in list(model.graphs()):
        for node in reversed(list(graph)):
            for pattern, write in _FORMS.get(node.op_type, ()) if node.domain == "" and node.graph is graph else ():
                match = find_match(pattern, node.outputs[0], _accepts)
                if match is not None:
                    operands = [value.producer() for value in node.inputs if value is not None]
                    replace_node(node, write(Builder(graph, before=node), match))
                    remove_unread(graph, *operands)
                    restored = True
                    break
    return restored


def _accepts(match: Match) -> bool:
    """Whether the bound of a cosine, if there is one, is a small one of the lengths of two vectors."""
    return "epsilon" not in match.found or (
        0 < match["epsilon"] <= LONGEST_EPSILON and _is_square(match["a"]) and _is_square(match["b"])
    )


def _is_square(value: ir.Value) -> bool:
    total = producer_of(value, "ReduceSum")
    terms = value if total is None else total.inputs[0]
    square = producer_of(terms, "Mul")
    return constant_array(terms) is not None or (square is not None and square.inputs[0] is square.inputs[1])


def _atan2(builder: Builder, match: Match) -> Tensor:
    """The angle of (x, y), by the quotient that is at most 1; 0 at the origin."""
    y, x = builder.tensor(match["y"]), builder.tensor(match["x"])
    zero, one = builder.scalar(0, y), builder.scalar(1, y)
    is_steep = builder.op("Greater", builder.op("Abs", y), builder.op("Abs", x))
    longer, shorter = builder.op("Where", is_steep, y, x), builder.op("Where", is_steep, x, y)
    is_origin = builder.op("Equal", longer, zero)
    angle = builder.op("Atan", builder.op("Where", is_origin, zero, shorter) / builder.op("Where", is_origin, one, longer))
    above, behind = builder.tensor(match["above"]), builder.tensor(match["behind"])
    half = builder.op("Where", above, builder.scalar(math.pi / 2, y), builder.scalar(-math.pi / 2, y))
    return builder.op("Where", is_steep, half - angle, angle + builder.op("Where", behind, half + half, zero))


def _sinc(builder: Builder, match: Match) -> Tensor:
    x = builder.tensor(match["x"])
    is_zero, one, scaled = builder.op("Equal", x, 0.0), builder.scalar(1, x), x * math.pi
    return builder.op("Where", is_zero, one, builder.op("Sin", scaled) / builder.op("Where", is_zero, one, scaled))


def _xlogy(builder: Builder, match: Match) -> Tensor:
    x, y = builder.tensor(match["x"]), builder.tensor(match["y"])
    is_zero = builder.op("And", builder.op("Equal", x, 0.0), builder.op("LessOrEqual", y, 0.0))
    return x * builder.op("Log", builder.op("Where", is_zero, builder.scalar(1, y), y))


def _cosine(builder: Builder, match: Match) -> Tensor:
    """The product of two vectors by their lengths, each of which is bounded, and its bound without a gradient."""
    squares = [_sum_of_squares(builder, match[name], match["product"]) for name in ("a", "b")]
    lengths = [builder.op("Max", builder.op("Sqrt", square), match["epsilon"]) for square in squares]
    for length in lengths:
        producer = length.value.producer()
        assert producer is not None
        producer.metadata_props[SUBGRADIENT] = WHOLE
    return builder.tensor(match["product"]) / (lengths[0] * lengths[1])


def _sum_of_squares(builder: Builder, total: ir.Value, product: ir.Value) -> Tensor:
    """The sum of squares; those of a weight are computed from it again, if the exporter stored them next to it."""
    reduction, dot = producer_of(total, "ReduceSum"), producer_of(product, "ReduceSum")
    factors = None if dot is None else producer_of(dot.inputs[0], "Mul")
    stored = None if reduction is None else constant_array(reduction.inputs[0])
    if reduction is None or factors is None or stored is None:
        return builder.tensor(total)
    for weight in factors.inputs:
        array = constant_array(weight)
        if weight is not None and weight.is_initializer() and array is not None and np.array_equal(array * array, stored):
            tensor = builder.tensor(weight)
            axes = [builder.tensor(value) for value in reduction.inputs[1:] if value is not None]
            attributes = {name: attribute.value for name, attribute in reduction.attributes.items()}
            return builder.op("ReduceSum", tensor * tensor, *axes, like=builder.tensor(total), **attributes)
    return builder.tensor(total)


def _forms() -> dict[str, tuple[tuple[Node, Callable[[Builder, Match], Tensor]], ...]]:
    x, y, product, zero = Variable("x"), Variable("y"), Variable("product"), Number(0.0)
    angle = Node("Atan", Node("Div", y, x))
    turned = Node("Where", Variable("above"), Node("Add", angle, Number(math.pi)), Node("Sub", angle, Number(math.pi)))
    scaled = Node("Mul", x, Number(math.pi))
    logarithm = Node("Where", Node("IsNaN", y), y, Node("Mul", x, Node("Log", y)))
    is_zero = Node("Equal", x, zero)
    bounded = Node("Max", Node("Sqrt", Node("Mul", Variable("a"), Variable("b"))), Number(name="epsilon"))
    return {
        "Where": (
            (Node("Where", Variable("behind"), turned, angle), _atan2),
            (Node("Where", is_zero, Number(1.0), Node("Div", Node("Sin", scaled), scaled)), _sinc),
            (Node("Where", is_zero, Either(zero, x), logarithm), _xlogy),
        ),
        "Div": ((Node("Div", product, bounded), _cosine),),
    }


_FORMS = _forms()
