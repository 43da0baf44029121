"""Recognition of scaled dot-product attention written as separate operators."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Builder, attribute_value, describe_node, same_dimension
from burnish.graph.matching import Either, Match, Node, Number, Pattern, Variable, find_match, why_not
from burnish.graph.uses import producer_of
from burnish.operators.attention import ATTENTION
from burnish.rewriting.normalization_patterns import replace_pieces, rounded, widened

RANK = 4
"""Rank of heads: samples, heads, positions, features."""

WIDE = {
    ir.DataType.FLOAT: ir.DataType.FLOAT,
    ir.DataType.DOUBLE: ir.DataType.DOUBLE,
    **dict.fromkeys(SIXTEEN_BIT, ir.DataType.FLOAT),
}
"""Dtype of the heads -> dtype of the probabilities."""

_log = logging.getLogger("burnish")


def recognize_attention(model: ir.Model) -> bool:
    """Replace, in place, ``softmax(query key * factor + mask) value`` over heads by ``burnish.ScaledDotProductAttention``.

    The scores may be multiplied or divided by a number and have a mask added, and NaN probabilities may be replaced by zeros. In
    mixed precision the softmax is float32, between casts. Attention with other readers of the probabilities or changes to them,
    such as dropout, stays; the log ``burnish`` gives the reason at level DEBUG.

    Args:
        model: a model bound to a mode.
    """
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is None or node.domain != "" or node.op_type != "MatMul":
            continue
        match = find_match(_ATTENTION, node.outputs[0], _is_of_heads)
        if match is None:
            _say_why_not(node)
            continue
        builder = Builder(model.graph, before=node)
        operands = [builder.tensor(match[name]) for name in ("query", "key", "value")]
        mask = match.get("mask")
        added = None if mask is None else builder.cast(builder.tensor(mask), WIDE[operands[0].dtype])
        result, _ = ATTENTION.emit(
            *operands,
            added,
            factor=match.found.get("factor", 1.0),
            divisor=match.found.get("divisor", 1.0),
            zeros=int("guarded" in match.found),
        )
        replace_pieces(model.graph, node.outputs[0], result)
        changed = True
    return changed


def _say_why_not(product: ir.Node) -> None:
    if _log.isEnabledFor(logging.DEBUG) and _reads_probabilities(product):
        _log.debug("%s is not attention: %s", describe_node(product), why_not(_ATTENTION, product.outputs[0], _is_of_heads))


def _reads_probabilities(product: ir.Node) -> bool:
    maker = producer_of(product.inputs[0])
    operands = () if maker is None else (maker.outputs[0], *maker.inputs)
    return any(producer_of(value, "Softmax") is not None for value in operands)


def _is_of_heads(match: Match) -> bool:
    query, key, value, mask = (match.get(name) for name in ("query", "key", "value", "mask"))
    wide = WIDE.get(query.dtype)
    probabilities = next(node for node in match.nodes if node.op_type == "Softmax").outputs[0]
    if wide is None or probabilities.dtype != wide or not _fit(query, key, value):
        return False
    numbers = [match.found.get(name, 1.0) for name in ("factor", "divisor")]
    if not all(number != 0.0 and float(np.float32(number)) == number for number in numbers):
        return False
    return mask is None or (mask.dtype in (wide, query.dtype) and _broadcasts(mask, probabilities))


def _fit(query: ir.Value, key: ir.Value, value: ir.Value) -> bool:
    """True for [N, H, M, D], [N, H, D, L] and [N, H, L, E] of one dtype, with extents known to be equal."""
    shapes = [operand.shape for operand in (query, key, value)]
    if not all(operand.dtype == query.dtype for operand in (key, value)):
        return False
    if not all(shape is not None and len(shape) == RANK for shape in shapes):
        return False
    one, two, three = ([*shape.dims] for shape in shapes if shape is not None)
    pairs = [(one[0], two[0]), (one[0], three[0]), (one[1], two[1]), (one[1], three[1]), (one[3], two[2]), (two[3], three[2])]
    return all(same_dimension(left, right) for left, right in pairs)


def _broadcasts(mask: ir.Value, scores: ir.Value) -> bool:
    if mask.shape is None or scores.shape is None or len(mask.shape) > len(scores.shape):
        return False
    pairs = zip(mask.shape.dims, scores.shape.dims[len(scores.shape) - len(mask.shape) :], strict=True)
    return all(extent == 1 or same_dimension(extent, other) for extent, other in pairs)


def _reads_last_axis(node: ir.Node) -> dict[str, Any] | None:
    return {} if attribute_value(node, "axis", -1) in (-1, RANK - 1) else None


def _scaled(x: Pattern) -> Pattern:
    return Either(Node("Mul", x, Number(name="factor")), Node("Div", x, Number(name="divisor")), x)


def _masked(scores: Pattern) -> Pattern:
    return Either(Node("Add", scores, Variable("mask")), scores)


def _attention() -> Pattern:
    product = Node("MatMul", Variable("query"), Variable("key"))
    scores = Either(
        _masked(_scaled(product)),
        _masked(_scaled(widened(product))),
        _masked(widened(_scaled(product))),
        widened(_masked(_scaled(product))),
    )
    probabilities = Node("Softmax", scores, reads=_reads_last_axis)
    guarded = Node("Where", Node("IsNaN", probabilities), Number(0.0), probabilities, reads=lambda node: {"guarded": True})
    shown = Either(guarded, probabilities)
    return Node("MatMul", Either(rounded(shown), shown), Variable("value"))


_ATTENTION = _attention()
