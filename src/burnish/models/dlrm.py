"""A recommendation model of embedding tables and dot products, after Naumov et al. 2019, "Deep learning recommendation model"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.models.layers import Layers
from burnish.validation import is_whole


def dlrm(
    rows: Sequence[int],
    numbers: int = 13,
    width: int = 16,
    bottom: Sequence[int] = (64, 32),
    top: Sequence[int] = (64, 32),
    seed: int = 0,
) -> ir.Model:
    """Build a recommendation model in standard ONNX, in inference form, with initial weights.

    Dense layers with ReLU (the bottom) turn the numbers of a sample into a vector of ``width``. Each category selects such a
    vector from its own table. The bottom's vector, followed by the dot products of all pairs of vectors, goes through dense
    layers (the top) to one logit: the score of a click.

    Args:
        rows: number of rows of each embedding table.
        numbers: number of numeric features of a sample.
        width: size of a row, and of the bottom's output.
        bottom: widths of the bottom's hidden layers.
        top: widths of the top's hidden layers.
        seed: seed of the initial weights, as in the reference implementation: tables uniform in ±1 / sqrt(rows), matrices normal
            with variance 2 / (inputs + outputs), biases normal with variance 1 / outputs.

    Returns:
        A model with the inputs ``numbers`` (float32, [batch, numbers]) and ``category_<i>`` (int64, [batch], rows of table i,
        counted from 1), the tables ``table_<i>`` and the output ``logits`` (float32, [batch, 1]).

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1, or no table.
    """
    if not rows or not all(is_whole(size) and size >= 1 for size in (*rows, numbers, width, *bottom, *top)):
        raise ConfigurationError(
            f"dlrm: rows={tuple(rows)}, numbers={numbers}, width={width}, bottom={tuple(bottom)}, top={tuple(top)}: every number "
            "has to be whole and 1 or more, and there has to be a table"
        )
    network = _Network("dlrm", seed)
    x = network.input("numbers", ir.DataType.FLOAT, numbers)
    for place, size in enumerate((*bottom, width), 1):
        x = network.hidden(f"bottom_{place}", x, size)
    vectors = [x]
    for place, count in enumerate(rows, 1):
        category = network.input(f"category_{place}", ir.DataType.INT64)
        table = network.uniform(f"table_{place}", 1 / np.sqrt(count), count, width)
        vectors.append(network.builder.op("Gather", table, category, axis=0))
    y = network.interaction(vectors, width)
    for place, size in enumerate(top, 1):
        y = network.hidden(f"top_{place}", y, size)
    features = y.dimension(1)
    assert features is not None
    return network.model(network.dense(f"top_{len(top) + 1}", y, features, 1), 1)


class _Network(Layers):
    def hidden(self, name: str, x: Tensor, features_out: int) -> Tensor:
        features_in = x.dimension(1)
        assert features_in is not None
        return self.builder.op("Relu", self.dense(name, x, features_in, features_out))

    def dense(self, name: str, x: Tensor, features_in: int, features_out: int) -> Tensor:
        matrix = self.generator.normal(0.0, np.sqrt(2 / (features_in + features_out)), (features_out, features_in))
        bias = self.weight(f"{name}.bias", self.generator.normal(0.0, np.sqrt(1 / features_out), features_out))
        return self.builder.op("Gemm", x, self.weight(f"{name}.weight", matrix), bias, transB=1)

    def interaction(self, vectors: Sequence[Tensor], width: int) -> Tensor:
        """Emit the first vector, followed by the dot products of all pairs, row by row below the diagonal."""
        builder, count = self.builder, len(vectors)
        rows = [builder.op("Unsqueeze", vector, builder.integers([1])) for vector in vectors]
        stacked = builder.op("Concat", *rows, axis=1)
        products = builder.op("MatMul", stacked, builder.op("Transpose", stacked, perm=[0, 2, 1]))
        flat = builder.op("Reshape", products, builder.integers([-1, count * count]))
        pairs = [row * count + column for row in range(count) for column in range(row)]
        chosen = builder.op("Gather", flat, builder.integers(pairs), axis=1)
        joined = builder.op("Concat", vectors[0], chosen, axis=1)
        joined.value.shape = ir.Shape(["batch", width + len(pairs)])
        return joined
