"""Data preparation: operators of ``ai.onnx.ml`` that scale, impute, select and join features.

Their numbers are constants and not trained. Each function rewrites a node as standard operators, or returns None for a form on
which the standard and ONNX Runtime disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Builder, Tensor, attribute_value, describe_node
from burnish.graph.matching import Node, Variable
from burnish.graph.uses import producer_of
from burnish.importer.classical.inference import integers, numbers

_LOGISTIC_PAIR = Node("Sigmoid", Node("Concat", Node("Neg", Variable("score")), Variable("score")))
_NUMERIC = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32})
_MOST_RANK = 2
"""Data is [N, F], or one sample [F]; runtimes disagree about more axes."""


def scaler(node: ir.Node, builder: Builder) -> Tensor | None:
    """Emit ``(x - offset) * scale`` in float32; float64 is computed in float64 and then rounded.

    Raises:
        ModelError: offsets and scales differ in number, or there are neither one nor one per feature.
    """
    x = _operand(node, builder)
    offset, scale = numbers(node, "offset"), numbers(node, "scale")
    if x is None:
        return None
    if offset.size == 0 or offset.size != scale.size or not _fits(x, scale):
        raise ModelError(
            f"{describe_node(node)} has {offset.size} offsets and {scale.size} scales for {_features(x)} features: "
            "it takes one of each, or one for each feature. Export the model again"
        )
    wide = x if x.dtype == ir.DataType.DOUBLE else builder.cast(x, ir.DataType.FLOAT)
    dtype = wide.dtype.numpy()
    scaled = (wide - builder.constant(offset.astype(dtype))) * builder.constant(scale.astype(dtype))
    return builder.cast(scaled, ir.DataType.FLOAT)


def normalizer(node: ir.Node, builder: Builder) -> Tensor | None:
    """Emit each row divided by its largest element (MAX) or its norm (L1, L2), in float32; zero rows stay.

    L1 of rows that already sum to 1, as after a classifier's softmax, is omitted.
    """
    x = _operand(node, builder)
    norm = attribute_value(node, "norm", "MAX")
    if x is None or norm not in ("MAX", "L1", "L2"):
        return None
    x = builder.cast(x, ir.DataType.FLOAT)
    if norm == "L1" and _sums_to_one(x.value):
        return x
    reduction = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceSumSquare"}[norm]
    total = builder.op(reduction, x, builder.integers([-1]), keepdims=1)
    total = builder.op("Where", builder.op("Equal", total, 0.0), builder.scalar(1.0, total), total)
    return x / (builder.op("Sqrt", total) if norm == "L2" else total)


def imputer(node: ir.Node, builder: Builder) -> Tensor | None:
    """Replace missing values: NaN, infinity or a number that represents them."""
    x = _operand(node, builder)
    if x is None:
        return None
    is_floating = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    values = numbers(node, "imputed_value_floats") if is_floating else integers(node, "imputed_value_int64s")
    missing = attribute_value(node, "replaced_value_float" if is_floating else "replaced_value_int64", 0)
    if not _fits(x, values):
        return None
    is_missing = builder.op("IsNaN", x) if np.isnan(missing) else builder.op("Equal", x, builder.scalar(missing, x))
    return builder.op("Where", is_missing, builder.constant(values.astype(x.dtype.numpy())), x)


def binarizer(node: ir.Node, builder: Builder) -> Tensor | None:
    """Emit 1 for elements above the threshold, else 0."""
    x = _operand(node, builder)
    if x is None:
        return None
    passed = builder.op("Greater", x, builder.scalar(attribute_value(node, "threshold", 0.0), x))
    return builder.cast(passed, x.dtype)


def feature_vectorizer(node: ir.Node, builder: Builder) -> Tensor | None:
    """Concatenate columns in float32; the sizes in the node must match its inputs."""
    sizes = integers(node, "inputdimensions")
    columns = []
    for value in node.inputs:
        x = None if value is None else builder.tensor(value)
        if x is None or x.value.dtype not in _NUMERIC or x.rank != _MOST_RANK:
            return None
        columns.append(builder.cast(x, ir.DataType.FLOAT))
    if [column.dimension(1) for column in columns] != sizes.tolist():
        return None
    return builder.op("Concat", *columns, axis=1)


def array_feature_extractor(node: ir.Node, builder: Builder) -> Tensor | None:
    """Select columns by index: [N, F] to [N, K], and one sample [F] to [1, K]; also for strings."""
    value, positions = node.inputs[0], node.inputs[1]
    if value is None or value.dtype is None or positions is None or value.shape is None or len(value.shape) == 0:
        return None
    x = builder.tensor(value)
    if x.rank == 1:
        x = builder.op("Unsqueeze", x, builder.integers([0]))
    return builder.op("Gather", x, builder.op("Reshape", builder.tensor(positions), builder.integers([-1])), axis=-1)


def one_hot_encoder(node: ir.Node, builder: Builder) -> Tensor | None:
    """Emit one column per category along a new last axis, in float32. Encoders of text, or that refuse unknown values, stay."""
    x = _operand(node, builder, most_rank=None)
    categories = integers(node, "cats_int64s")
    if x is None or categories.size == 0 or attribute_value(node, "zeros", 1) != 1:
        return None
    x = builder.op("Unsqueeze", builder.cast(x, ir.DataType.INT64), builder.integers([-1]))
    return builder.cast(builder.op("Equal", x, builder.constant(categories)), ir.DataType.FLOAT)


def _operand(node: ir.Node, builder: Builder, most_rank: int | None = _MOST_RANK) -> Tensor | None:
    value = node.inputs[0]
    if value is None or value.dtype not in _NUMERIC or value.shape is None:
        return None
    return None if most_rank is not None and not 1 <= len(value.shape) <= most_rank else builder.tensor(value)


def _features(x: Tensor) -> int | str:
    return x.dimension(-1) or "an unknown number of"


def _fits(x: Tensor, values: np.ndarray) -> bool:
    return values.size == 1 or (values.size > 1 and x.dimension(-1) in (None, values.size))


def _sums_to_one(value: ir.Value) -> bool:
    """True if each row is a softmax, or the logistic function of a score and its negative."""
    if (softmax := producer_of(value, "Softmax")) is not None:
        return value.shape is not None and softmax.attributes["axis"].as_int() in (-1, len(value.shape) - 1)
    match = next(_LOGISTIC_PAIR.match(value), None)
    score = None if match is None else match["score"]
    return score is not None and score.shape is not None and score.shape.dims[-1] == 1


FEATURES: Mapping[str, Callable[[ir.Node, Builder], Tensor | None]] = {
    "ArrayFeatureExtractor": array_feature_extractor,
    "Binarizer": binarizer,
    "FeatureVectorizer": feature_vectorizer,
    "Imputer": imputer,
    "Normalizer": normalizer,
    "OneHotEncoder": one_hot_encoder,
    "Scaler": scaler,
}
