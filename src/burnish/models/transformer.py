"""Shared layers of transformers over tokens, after Vaswani et al. 2017, "Attention is all you need"."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from burnish.data.model_metadata import DataDescription
from burnish.data.text.settings import TextDescription
from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.models.layers import Layers
from burnish.validation import is_number, is_whole

OPSET = 20
TOKENS = "tokens"
DEVIATION = 0.02
"""Standard deviation of the initial weights of BERT and GPT-2."""
Activation = Literal["gelu", "gelu_tanh"]


def check_sizes(model: str, heads: int, width: int, dropout: float, **sizes: int) -> None:
    """Raise ConfigurationError for sizes that are not whole numbers of at least 1 or do not fit, or a dropout outside [0, 1)."""
    sizes = {**sizes, "width": width, "heads": heads}
    wrong = next((name for name, size in sizes.items() if not is_whole(size) or size < 1), None)
    if wrong is not None:
        raise ConfigurationError(f"{model}: {wrong}={sizes[wrong]!r}: give a whole number of 1 or more")
    if width % heads:
        raise ConfigurationError(f"{model}: width={width} is no multiple of heads={heads}: each head has its part of the width")
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise ConfigurationError(f"{model}: dropout={dropout!r}: give the share that is dropped, from 0 to below 1")


class Transformer(Layers):
    """Emits layers over [batch, tokens, width] and registers their weights as initializers, drawn in the order of emission.

    Args:
        name: name of the graph.
        width: size of a token's vector.
        heads: number of attention heads.
        hidden: width inside a feed-forward network.
        epsilon: epsilon of layer normalization.
        dropout: share of values that training drops before a layer's output is added.
        seed: seed of the initial weights.
    """

    def __init__(self, name: str, width: int, heads: int, hidden: int, epsilon: float, dropout: float, seed: int):
        super().__init__(name, seed, OPSET)
        self.width, self.heads, self.hidden, self.epsilon, self.ratio = width, heads, hidden, epsilon, dropout

    def drawn(self, name: str, *shape: int, deviation: float = DEVIATION) -> Tensor:
        """Add a normally distributed weight."""
        return self.weight(name, self.generator.normal(0.0, deviation, shape))

    def dense(self, name: str, x: Tensor, features_in: int, features_out: int, deviation: float = DEVIATION) -> Tensor:
        product = self.builder.op("MatMul", x, self.drawn(f"{name}.weight", features_in, features_out, deviation=deviation))
        return product + self.weight(f"{name}.bias", np.zeros(features_out))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale, bias = self.weight(f"{name}.weight", np.ones(self.width)), self.weight(f"{name}.bias", np.zeros(self.width))
        return self.builder.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.epsilon)

    def dropout(self, x: Tensor) -> Tensor:
        return x if self.ratio == 0 else self.builder.op("Dropout", x, self.builder.scalar(self.ratio, ir.DataType.FLOAT))

    def position(self, places: Tensor, positions: int) -> Tensor:
        """Emit the position embeddings of these places, [tokens, width], and store the longest length in the metadata."""
        self.metadata = DataDescription(text=TextDescription(length=positions)).metadata()
        return self.builder.op("Gather", self.drawn("embeddings.positions", positions, self.width), places, axis=0)

    def places(self, ids: Tensor) -> Tensor:
        """Emit 0, 1, ... for the tokens of a text, int64 [tokens]."""
        zero, one = (self.builder.scalar(number, ir.DataType.INT64) for number in (0, 1))
        count = self.builder.op(
            "Squeeze", self.builder.op("Shape", ids, start=1, end=2), self.builder.integers([0]), shape=ir.Shape([])
        )
        return self.builder.op("Range", zero, count, one, shape=ir.Shape([TOKENS]))

    def hidden_keys(self, is_hidden: Tensor) -> Tensor:
        """Emit the mask to add to the attention scores: the lowest float32 for hidden keys, otherwise 0."""
        lowest, zero = (self.builder.scalar(number, ir.DataType.FLOAT) for number in (float(np.finfo(np.float32).min), 0.0))
        return self.builder.op("Where", is_hidden, lowest, zero)

    def attention(self, name: str, x: Tensor, mask: Tensor, deviation: float = DEVIATION) -> Tensor:
        """Emit multi-head self-attention; ``mask`` is added to the scores."""
        builder, size = self.builder, self.width // self.heads
        to_heads = builder.integers([0, 0, self.heads, size])
        query, key, value = (
            builder.op("Reshape", self.dense(f"{name}.{part}", x, self.width, self.width), to_heads)
            for part in ("query", "key", "value")
        )
        query, value = (builder.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
        scores = builder.op("MatMul", query, builder.op("Transpose", key, perm=[0, 2, 3, 1])) / float(np.sqrt(size))
        mixed = builder.op("MatMul", builder.op("Softmax", scores + mask, axis=-1), value)
        joined = builder.op("Reshape", builder.op("Transpose", mixed, perm=[0, 2, 1, 3]), builder.integers([0, 0, self.width]))
        return self.dense(f"{name}.output", joined, self.width, self.width, deviation)

    def feed_forward(self, name: str, x: Tensor, activation: Activation, deviation: float = DEVIATION) -> Tensor:
        """Emit two dense layers with GELU between (Hendrycks and Gimpel 2016), or its tanh approximation."""
        wide = self.dense(f"{name}.up", x, self.width, self.hidden)
        return self.dense(f"{name}.down", self.activated(wide, activation), self.hidden, self.width, deviation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        return self.builder.op("Gelu", x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        """Emit the product of each token with each row of a table: [batch, tokens, rows]."""
        return self.builder.op("MatMul", x, self.builder.op("Transpose", table, perm=[1, 0]))
