"""Recognition of root-mean-square normalization (Zhang and Sennrich 2019), as exported for T5, Llama and similar models."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder
from burnish.graph.matching import Either, Match, Node, Pattern, Product, Variable, find_match
from burnish.graph.versions import raise_opset
from burnish.rewriting.normalization_patterns import (
    affine_operand,
    fits_normalized_shape,
    inverse_standard_deviation,
    is_valid_epsilon,
    keeps_precision,
    mean,
    replace_pieces,
    rounded,
    square,
    standard_deviation,
    widened,
)

OPSET = 23
"""First opset with RMSNormalization."""

SCALE = Variable("scale")


def recognize_rms_normalization(model: ir.Model) -> bool:
    """Replace, in place, ``x / sqrt(mean(x * x) + epsilon) * scale`` over trailing axes by RMSNormalization.

    The opset is raised to 23 if every other node keeps its meaning; otherwise nothing is replaced. Statistics are float32; for 16
    bits, x is widened and the normalized value rounded, as in the standard's operator. Intermediate values must have no other
    readers. The scale keeps its name.
    """
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is None or node.domain != "" or node.op_type not in ("Cast", "Div", "Mul"):
            continue
        match = find_match(_LAYER, node.outputs[0], _is_layer)
        if match is None:
            continue
        if not raise_opset(model.graph, OPSET):
            break
        builder = Builder(model.graph, before=node)
        x = builder.tensor(match["x"])
        scale = affine_operand(builder, match, match.get("scale"))
        layer = builder.op("RMSNormalization", x, scale, like=x, axis=-match["axes"], epsilon=match["epsilon"])
        replace_pieces(model.graph, node.outputs[0], layer)
        changed = True
    return changed


def _is_layer(match: Match) -> bool:
    return fits_normalized_shape(match.get("scale"), match) and is_valid_epsilon(match) and keeps_precision(match)


def _layer(x: Pattern) -> Pattern:
    power = mean(square(x))
    deviation, inverse = standard_deviation(power), inverse_standard_deviation(power)
    return Either(
        Node("Mul", Node("Div", x, deviation), SCALE),
        Node("Div", Node("Mul", x, SCALE), deviation),
        Product(x, inverse, SCALE),
        Node("Div", x, deviation),
        Node("Mul", x, inverse),
    )


def _half_precision_layer(x: Pattern) -> Pattern:
    power = mean(square(x))
    normalized = rounded(Either(Node("Div", x, standard_deviation(power)), Node("Mul", x, inverse_standard_deviation(power))))
    return Either(Node("Mul", normalized, SCALE), normalized)


_LAYER = Either(_half_precision_layer(widened(Variable("x"))), _layer(Variable("x")))
