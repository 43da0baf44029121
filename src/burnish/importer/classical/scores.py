"""What linear models of ``ai.onnx.ml`` do to their scores: the attribute ``post_transform``."""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor, attribute_value, describe_node

_WINITZKI = 0.147
"""The constant of the approximation of erf's inverse that ONNX Runtime computes (S. Winitzki, 2008)."""
_SMALLEST_SCORE = 1e-7
"""ONNX Runtime's SOFTMAX_ZERO takes scores that are no further from zero for zero."""


def post_transform(node: ir.Node) -> str:
    """The transform that a node asks for.

    Raises:
        UnsupportedOperatorError: there is no such one.
    """
    name: str = attribute_value(node, "post_transform", "NONE")
    if name not in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"):
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has the post_transform '{name}', which the standard does not know: it has NONE, SOFTMAX, "
            "LOGISTIC, SOFTMAX_ZERO and PROBIT. Export the model again"
        )
    return name


def transformed(builder: Builder, scores: Tensor, name: str, columns: int) -> Tensor:
    """Emit the transform of scores [N, columns], as ONNX Runtime computes it: of a single column only PROBIT does anything."""
    if name == "PROBIT":
        return _probit(builder, scores)
    if name == "NONE" or columns == 1:
        return scores
    if name == "LOGISTIC":
        return builder.op("Sigmoid", scores)
    return builder.op("Softmax", scores, axis=1) if name == "SOFTMAX" else _softmax_of_nonzero(builder, scores)


def _softmax_of_nonzero(builder: Builder, scores: Tensor) -> Tensor:
    """Softmax over the scores that are not zero; those that are get next to nothing."""
    axis = builder.integers([1])
    largest = builder.op("ReduceMax", scores, axis, keepdims=1)
    counts = builder.op("Greater", builder.op("Abs", scores), _SMALLEST_SCORE)
    exponential = builder.op("Exp", scores - largest)
    total = builder.op("ReduceSum", builder.op("Where", counts, exponential, builder.scalar(0.0, scores)), axis, keepdims=1)
    return builder.op("Where", counts, exponential, scores * builder.op("Exp", -largest)) / total


def _probit(builder: Builder, scores: Tensor) -> Tensor:
    """The quantile of the normal distribution, sqrt(2) erfinv(2p - 1), by Winitzki's approximation of erf's inverse."""
    x = scores * 2.0 - 1.0
    log = builder.op("Log", (1.0 - x) * (x + 1.0))
    v = log * 0.5 + 2.0 / (math.pi * _WINITZKI)
    magnitude = builder.op("Sqrt", builder.op("Sqrt", v * v - log * (1.0 / _WINITZKI)) - v)
    negative = builder.op("Less", x, 0.0)
    return builder.op("Where", negative, -magnitude, magnitude) * math.sqrt(2.0)
