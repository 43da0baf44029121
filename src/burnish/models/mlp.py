"""A multilayer perceptron: dense layers with ReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from burnish.models.layers import LARGEST, Layers, check_extents, check_input_shape
from burnish.validation import check_count, require


def mlp(input_shape: Sequence[int], classes: int = 10, width: int = 128, layers: int = 2, seed: int = 0) -> ir.Model:
    """Build a classifier of dense layers with ReLU in standard ONNX, in inference form, with initial weights.

    Args:
        input_shape: shape of a sample: (features,). More dimensions are flattened.
        classes: number of classes.
        width: width of the hidden layers.
        layers: number of hidden layers.
        seed: seed of the initial weights: uniform with bound 1 / sqrt(fan-in), as in PyTorch.

    Returns:
        A model with the input ``x`` (float32, [batch, *input_shape]) and the output ``logits`` (float32, [batch, classes]).

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1 or is too large, or an invalid shape.
    """
    axes = [f"axis {axis}" for axis in range(len(input_shape))] if isinstance(input_shape, Sequence) else []
    check_input_shape("mlp", input_shape, *(axes if len(axes) > 1 else ["features"]))
    features = math.prod(input_shape)
    require(features <= LARGEST, "mlp", "input_shape", tuple(input_shape), f"of at most {LARGEST:,} values")
    check_extents("mlp", classes=classes, width=width, layers=layers)
    check_count("mlp", 0, seed=seed)
    network = Layers("mlp", seed)
    y = network.input("x", ir.DataType.FLOAT, *input_shape)
    if len(input_shape) > 1:
        y = network.builder.op("Flatten", y, axis=1)
    for layer in range(1, layers + 1):
        y = network.builder.op("Relu", network.dense(f"layers.{layer}", y, features, width))
        features = width
    return network.model(network.dense("classifier", y, features, classes), classes)
