"""Recognition of layer normalization (Ba, Kiros and Hinton 2016) as exported by PyTorch, TensorFlow and Keras below opset 17."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder
from burnish.graph.matching import Either, Match, Node, Pattern, Product, Variable, find_match
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

SCALE, BIAS = Variable("scale"), Variable("bias")


def recognize_layer_normalization(model: ir.Model) -> bool:
    """Replace, in place, written-out layer normalization by LayerNormalization of opset 17.

    Matches normalization over trailing axes, with or without scale and bias, as ``(x - mean) / sqrt(variance + epsilon) * scale +
    bias`` and as ``x * a + (bias - mean * a)`` with a = scale / sqrt(variance + epsilon), with factors in any order. Statistics
    are float32; for 16 bits, x is widened and the normalized value rounded, as in the standard's operator. Intermediate values
    must have no other readers, and operands must broadcast to the normalized axes. Scale and bias keep their names.
    """
    # Backwards, to find a layer with its affine part first.
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is not None and node.domain == "" and node.op_type in ("Add", "Cast", "Div", "Mul", "Sub"):
            changed |= _recognize(model.graph, node.outputs[0])
    return changed


def _recognize(graph: ir.Graph, output: ir.Value) -> bool:
    match = find_match(_LAYER, output, _is_layer)
    node = output.producer()
    if match is None or node is None:
        return False
    builder = Builder(graph, before=node)
    x = builder.tensor(match["x"])
    affine = [affine_operand(builder, match, match.get("scale"))]
    if match.get("bias") is not None:
        affine.append(affine_operand(builder, match, match["bias"]))
    layer = builder.op("LayerNormalization", x, *affine, like=x, axis=-match["axes"], epsilon=match["epsilon"])
    replace_pieces(graph, output, layer)
    return True


def _is_layer(match: Match) -> bool:
    fits = all(fits_normalized_shape(match.get(name), match) for name in ("scale", "bias"))
    return fits and is_valid_epsilon(match) and keeps_precision(match)


def _layer(x: Pattern) -> Pattern:
    centered = Node("Sub", x, mean(x))
    variance = mean(square(Either(centered, Node("Sub", mean(x), x))))
    deviation, inverse = standard_deviation(variance), inverse_standard_deviation(variance)
    normalized = Either(Node("Div", centered, deviation), Node("Mul", centered, inverse))
    scaled = Either(
        Node("Mul", Node("Div", centered, deviation), SCALE),
        Node("Div", Node("Mul", centered, SCALE), deviation),
        Product(centered, inverse, SCALE),
    )
    result = Either(scaled, normalized)
    return Either(Node("Add", result, BIAS), result, _uncentered(x, inverse))


def _uncentered(x: Pattern, inverse: Pattern) -> Pattern:
    """Return the pattern of TensorFlow's batch_normalization, used for layer normalization by Keras and BERT of 2018."""
    gain = Either(Node("Mul", inverse, SCALE), inverse)
    scaled, shift = Node("Mul", x, gain), Node("Mul", mean(x), gain)
    negated = Either(Node("Neg", shift), Node("Mul", Node("Neg", mean(x)), gain))
    difference = Either(Node("Sub", scaled, shift), Node("Add", scaled, negated))
    return Either(
        Node("Add", scaled, Either(Node("Sub", BIAS, shift), Node("Add", negated, BIAS))),
        Node("Add", difference, BIAS),
        difference,
    )


def _half_precision_layer(x: Pattern) -> Pattern:
    centered = Node("Sub", x, mean(x))
    variance = mean(square(centered))
    normalized = rounded(
        Either(Node("Div", centered, standard_deviation(variance)), Node("Mul", centered, inverse_standard_deviation(variance)))
    )
    result = Either(Node("Mul", normalized, SCALE), normalized)
    return Either(Node("Add", result, BIAS), result)


_LAYER = Either(_half_precision_layer(widened(Variable("x"))), _layer(Variable("x")))
