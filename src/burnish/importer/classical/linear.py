"""Linear models of ``ai.onnx.ml``, with coefficients in attributes, as Gemm with trainable initializers; and their scores."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import Builder, Names, Tensor, add_initializer, attribute_value, describe_node
from burnish.graph.uses import is_used
from burnish.importer.classical.inference import integers, numbers, strings

_WINITZKI = 0.147
"""Constant in ONNX Runtime's approximation of the inverse of erf (S. Winitzki, 2008)."""
_SMALLEST_SCORE = 1e-7
"""Scores up to this size count as zero in ONNX Runtime's SOFTMAX_ZERO."""


def post_transform(node: ir.Node) -> str:
    """Return the post_transform of a node.

    Raises:
        UnsupportedOperatorError: it is unknown.
    """
    name: str = attribute_value(node, "post_transform", "NONE")
    if name not in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"):
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has the post_transform '{name}', which the standard does not know: it has NONE, SOFTMAX, "
            "LOGISTIC, SOFTMAX_ZERO and PROBIT. Export the model again"
        )
    return name


def transformed(builder: Builder, scores: Tensor, name: str, columns: int) -> Tensor:
    """Emit the transform of scores [N, columns] as in ONNX Runtime: for a single column only PROBIT has an effect."""
    if name == "PROBIT":
        return _probit(builder, scores)
    if name == "NONE" or columns == 1:
        return scores
    if name == "LOGISTIC":
        return builder.op("Sigmoid", scores)
    return builder.op("Softmax", scores, axis=1) if name == "SOFTMAX" else _softmax_of_nonzero(builder, scores)


def _softmax_of_nonzero(builder: Builder, scores: Tensor) -> Tensor:
    """Emit the softmax over nonzero scores; zero scores get almost nothing."""
    axis = builder.integers([1])
    largest = builder.op("ReduceMax", scores, axis, keepdims=1)
    counts = builder.op("Greater", builder.op("Abs", scores), _SMALLEST_SCORE)
    exponential = builder.op("Exp", scores - largest)
    total = builder.op("ReduceSum", builder.op("Where", counts, exponential, builder.scalar(0.0, scores)), axis, keepdims=1)
    return builder.op("Where", counts, exponential, scores * builder.op("Exp", -largest)) / total


def _probit(builder: Builder, scores: Tensor) -> Tensor:
    """Emit the normal quantile, sqrt(2) erfinv(2p - 1), by Winitzki's approximation of the inverse of erf."""
    x = scores * 2.0 - 1.0
    log = builder.op("Log", (1.0 - x) * (x + 1.0))
    v = log * 0.5 + 2.0 / (math.pi * _WINITZKI)
    magnitude = builder.op("Sqrt", builder.op("Sqrt", v * v - log * (1.0 / _WINITZKI)) - v)
    negative = builder.op("Less", x, 0.0)
    return builder.op("Where", negative, -magnitude, magnitude) * math.sqrt(2.0)


_AGAIN = "Export the model again"


class LinearModels:
    """Rewrites linear models; their weights become initializers of the main graph.

    Args:
        graph: the main graph.
    """

    def __init__(self, graph: ir.Graph):
        self._graph = graph
        self._names = Names.of(graph)

    def regressor(self, node: ir.Node, builder: Builder) -> Tensor:
        """Rewrite a LinearRegressor: [N, targets], float32. Weights: ``<node>.coefficients`` [targets, F], ``.intercepts``.

        Raises:
            ModelError: the number of coefficients or intercepts does not match the targets.
        """
        targets = int(attribute_value(node, "targets", 1))
        coefficients, intercepts = numbers(node, "coefficients"), numbers(node, "intercepts")
        if targets < 1 or intercepts.size not in (0, targets):
            raise ModelError(f"{describe_node(node)} has {targets} targets and {intercepts.size} intercepts. {_AGAIN}")
        scores = self._scores(node, builder, _matrix(node, coefficients, targets), intercepts if intercepts.size else None)
        return transformed(builder, scores, post_transform(node), targets)

    def classifier(self, node: ir.Node, builder: Builder) -> tuple[Tensor | None, Tensor]:
        """Rewrite a LinearClassifier: labels [N], int64 or strings, and scores [N, C], float32.

        Weights: ``<node>.coefficients`` [C, F] and ``<node>.intercepts`` [C]. Binary logistic regression is written with a first
        row that is the negated second: this is preserved, and only the row of the second class is a weight. One row with two
        class labels is such a row. Labels follow the weights: they belong to the largest score before the transform, the first
        one in a tie.

        Raises:
            ModelError: coefficients, intercepts and class labels do not fit together.
            UnsupportedOperatorError: PROBIT of one row for two classes, for which ONNX Runtime reads foreign memory.
        """
        transform = post_transform(node)
        labels = _class_labels(node)
        intercepts = numbers(node, "intercepts")
        rows = intercepts.size
        if rows == 0:
            raise ModelError(f"{describe_node(node)} has no intercepts, which tell how many classes it has. {_AGAIN}")
        if (rows == 1 and labels.size not in (0, 2)) or (rows > 1 and labels.size < rows):
            raise ModelError(f"{describe_node(node)} has {rows} intercepts and {labels.size} class labels. {_AGAIN}")
        matrix = _matrix(node, numbers(node, "coefficients"), rows)
        if rows == 2 and transform == "LOGISTIC" and _is_negated(matrix) and _is_negated(intercepts[:, None]):
            matrix, intercepts, rows = matrix[1:], intercepts[1:], 1
        scores = self._scores(node, builder, matrix, intercepts)
        label = self._label(node, builder, scores, rows, labels)
        if rows > 1 or labels.size == 0:
            return label, transformed(builder, scores, transform, rows)
        return label, _both_classes(node, builder, scores, transform)

    def _scores(self, node: ir.Node, builder: Builder, matrix: np.ndarray, intercepts: np.ndarray | None) -> Tensor:
        value = node.inputs[0]
        assert value is not None
        x = builder.cast(builder.tensor(value), ir.DataType.FLOAT)
        if x.rank != 2:
            x = builder.op("Reshape", x, builder.integers([-1, matrix.shape[1]]))
        weights = [self._initializer(builder, f"{node.name}.coefficients", matrix)]
        if intercepts is not None:
            weights.append(self._initializer(builder, f"{node.name}.intercepts", intercepts))
        scores = builder.op("Gemm", x, *weights, transB=1)
        scores.value.name = self._names.take(f"{node.name}.scores")
        return scores

    def _initializer(self, builder: Builder, name: str, array: np.ndarray) -> Tensor:
        is_text = array.dtype == np.object_
        tensor = ir.StringTensor(array) if is_text else ir.Tensor(np.ascontiguousarray(array))
        return builder.tensor(add_initializer(self._graph, self._names.take(name), tensor))

    def _label(self, node: ir.Node, builder: Builder, scores: Tensor, rows: int, labels: np.ndarray) -> Tensor | None:
        """Return the labels of the largest scores [N]; None if nothing reads them."""
        if not is_used(node.outputs[0]):
            return None
        if rows > 1:
            index = builder.op("ArgMax", scores, axis=1, keepdims=0)
        else:
            score = builder.op("Reshape", scores, builder.integers([-1]))
            index = builder.cast(builder.op("Greater", score, builder.scalar(0.0, score)), ir.DataType.INT64)
        if labels.size == 0 or np.array_equal(labels, np.arange(labels.size)):
            return index
        return builder.op("Gather", self._initializer(builder, f"{node.name}.classlabels", labels), index, axis=0)


def _matrix(node: ir.Node, coefficients: np.ndarray, rows: int) -> np.ndarray:
    if coefficients.size == 0 or coefficients.size % rows:
        raise ModelError(f"{describe_node(node)} has {coefficients.size} coefficients, which do not make {rows} rows. {_AGAIN}")
    value = node.inputs[0]
    features = value.shape.dims[-1] if value is not None and value.shape is not None and len(value.shape) else None
    columns = coefficients.size // rows
    if isinstance(features, int) and features != columns:
        raise ModelError(f"{describe_node(node)} reads {features} features, and has coefficients for {columns}. {_AGAIN}")
    return coefficients.reshape(rows, columns)


def _class_labels(node: ir.Node) -> np.ndarray:
    texts = strings(node, "classlabels_strings")
    return texts if texts.size else integers(node, "classlabels_ints")


def _is_negated(rows: np.ndarray) -> bool:
    return bool(np.array_equal(rows[0], -rows[1]))


def _both_classes(node: ir.Node, builder: Builder, scores: Tensor, transform: str) -> Tensor:
    """Return the scores of both classes [N, 2] from those of the second [N, 1]."""
    if transform == "PROBIT":
        raise UnsupportedOperatorError(
            f"{describe_node(node)} is PROBIT of one row of coefficients for two classes, which runtimes compute differently: "
            "export the model with a row for each class"
        )
    if transform == "LOGISTIC":
        return builder.op("Sigmoid", builder.op("Concat", -scores, scores, axis=1))
    return builder.op("Concat", 1.0 - scores, scores, axis=1)
