"""Weights that look trained: one matrix has a direction that stands out, as training leaves one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

TIMES = 2.0
"""The length of the direction, in largest singular values of a random matrix of this size."""


def as_if_trained(model: ir.Model) -> ir.Model:
    """Add a direction to the largest matrix of a model's weights but the classifier's, and return the model."""
    weights = [value for name, value in model.graph.initializers.items() if not name.startswith("classifier")]
    value = max(weights, key=lambda each: each.const_value.size if len(each.const_value.shape) > 1 else 0)
    array = value.const_value.numpy()
    matrix = array.reshape(len(array), -1)
    rows, columns = matrix.shape
    left, right = np.random.default_rng(0).choice([-1.0, 1.0], rows), np.random.default_rng(1).choice([-1.0, 1.0], columns)
    length = TIMES * matrix.std() * (rows**0.5 + columns**0.5) / (rows * columns) ** 0.5
    changed = (matrix + length * np.outer(left, right)).reshape(array.shape).astype(array.dtype)
    value.const_value = ir.tensor(changed, name=value.name)
    return model
