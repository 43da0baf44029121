"""Recognition of Softmax, LogSoftmax and Sigmoid as written out by tf2onnx, JAX and hand-made graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, same_dimension
from burnish.graph.matching import Either, Match, Node, Number, Pattern, Product, Variable, find_match
from burnish.rewriting.normalization_patterns import replace_pieces

SHAPED = ("Reshape", "Expand", "Unsqueeze")
"""Operators that restore the shape of a reduced operand."""


def recognize_probabilities(model: ir.Model) -> bool:
    """Replace, in place, written-out probabilities by their operators.

    ``exp(x) / sum(exp(x))`` over one axis becomes Softmax and ``x - log(sum(exp(x)))`` LogSoftmax, also after subtraction of the
    largest x; the exponential of a LogSoftmax becomes Softmax. ``1 / (1 + exp(-x))`` and ``(1 + tanh(x / 2)) / 2`` become
    Sigmoid, and ``1 / (1 + exp(x))`` the Sigmoid of ``-x``. The divisor may be reshaped and expanded as long as each element is
    divided by the sum of its own line. Intermediate values must have no other readers.
    """
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is None or node.domain != "":
            continue
        for operator, pattern in _FORMS.get(node.op_type, ()):
            output = node.outputs[0]
            match = find_match(pattern, output, partial(_FITS[operator], output))
            if match is None:
                continue
            builder = Builder(model.graph, before=node)
            x = _operand(match)
            if operator == "Sigmoid":
                logit = -builder.tensor(x) if "negated" in match.found else builder.tensor(x)
                probabilities = builder.op("Sigmoid", logit, like=logit)
            else:
                unshifted = builder.tensor(_before_shift(x, match["axis"]))
                probabilities = builder.op(operator, unshifted, axis=match["axis"], like=unshifted)
            replace_pieces(model.graph, output, probabilities)
            changed = True
            break
    return changed


def _is_normalized(output: ir.Value, match: Match) -> bool:
    """True if each line is normalized by its own sum, and the output has the rank of x."""
    x: ir.Value = match["x"]
    last = output.producer()
    assert last is not None
    if last.op_type == "Exp":
        return True
    operands = [value for value in last.inputs if value is not None]
    exponentials = [value for value in operands if (node := value.producer()) is not None and node.op_type == "Exp"]
    sums = [value for value in operands if value is not x and value not in exponentials]
    return len(sums) == 1 and _spreads(sums[0], x, match["axis"]) and _has_rank_of(x, output)


def _keeps_rank(output: ir.Value, match: Match) -> bool:
    """True if no constant gave the output more axes than x has."""
    return _has_rank_of(_operand(match), output)


def _operand(match: Match) -> ir.Value:
    value: ir.Value = match.found["negated" if "negated" in match.found else "x"]
    return value


def _has_rank_of(x: ir.Value, output: ir.Value) -> bool:
    return x.shape is not None and output.shape is not None and len(x.shape) == len(output.shape)


def _spreads(value: ir.Value, x: ir.Value, axis: int) -> bool:
    """True if values per line of x along ``axis`` are aligned with the lines on the other axes.

    A reshape or expand may lose the name of one dimension: the number and order of elements determine it.
    """
    if value.shape is None or x.shape is None or len(value.shape) != len(x.shape):
        return False
    unknown = 0
    for index, (dimension, other) in enumerate(zip(value.shape.dims, x.shape.dims, strict=True)):
        if same_dimension(dimension, other) or (index == axis and dimension == 1):
            continue
        if isinstance(dimension, int) and isinstance(other, int):
            return False
        unknown += 1
    return unknown <= 1


def _before_shift(x: ir.Value, axis: int) -> ir.Value:
    """Return x before its largest element per line was subtracted, which changes neither Softmax nor its gradient."""
    for match in _SHIFTED.match(x):
        source: ir.Value = match["source"]
        if match["axis"] == axis and _spreads(match["largest"], source, axis) and _has_rank_of(source, x):
            return source
    return x


def _one_axis(node: ir.Node) -> Mapping[str, Any] | None:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    array = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    if array is None or array.size != 1:
        return None
    axis = int(array.reshape(-1)[0])
    return {"axis": axis % len(value.shape)} if len(value.shape) else None


def _own_axis(node: ir.Node) -> Mapping[str, Any]:
    return {"axis": attribute_value(node, "axis", -1)}


def _shaped(operand: Pattern, depth: int = 3) -> Pattern:
    """Return the pattern of an operand that may be reshaped, expanded or unsqueezed up to ``depth`` times."""
    if depth == 0:
        return operand
    inner = _shaped(operand, depth - 1)
    return Either(operand, *(Node(operator, inner, reads=lambda node: {}) for operator in SHAPED))


def _forms() -> dict[str, list[tuple[str, Pattern]]]:
    x = Variable("x")
    exponential = Node("Exp", x)
    total = Node("ReduceSum", exponential, reads=_one_axis)
    softmax = Node("Div", exponential, _shaped(total))
    inverse = Node("Mul", exponential, Either(Node("Reciprocal", _shaped(total)), _shaped(Node("Reciprocal", total))))
    log_softmax = Node("Sub", x, Either(_shaped(Node("Log", total)), Node("Log", _shaped(total))))
    negative = Either(Node("Neg", x), Node("Mul", x, Number(-1.0)))
    grown = Node("Add", Node("Exp", Either(negative, Variable("negated"))), Number(1.0))
    halved = Either(Node("Mul", x, Number(0.5)), Node("Div", x, Number(2.0)))
    twice = Node("Add", Node("Tanh", halved), Number(1.0))
    by_tanh = Node("Add", Node("Mul", Node("Tanh", halved), Number(0.5)), Number(0.5))
    return {
        "Div": [("Softmax", softmax), ("Sigmoid", Node("Div", Number(1.0), grown)), ("Sigmoid", Node("Div", twice, Number(2.0)))],
        "Mul": [("Softmax", inverse), ("Sigmoid", Product(twice, Number(0.5)))],
        "Sub": [("LogSoftmax", log_softmax)],
        "Exp": [("Softmax", Node("Exp", Node("LogSoftmax", x, reads=_own_axis)))],
        "Reciprocal": [("Sigmoid", Node("Reciprocal", grown))],
        "Add": [("Sigmoid", by_tanh)],
    }


_FORMS = _forms()
_FITS = {"Softmax": _is_normalized, "LogSoftmax": _is_normalized, "Sigmoid": _keeps_rank}
_SHIFTED = Node(
    "Sub",
    Variable("source"),
    _shaped(Node("ReduceMax", Variable("source"), reads=_one_axis)),
    reads=lambda node: {"largest": node.inputs[1]},
)
