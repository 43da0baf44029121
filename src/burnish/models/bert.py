"""A BERT encoder, after Devlin et al. 2018, "BERT: Pre-training of deep bidirectional transformers"."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.models.transformer import TOKENS, Transformer, check_sizes


def bert(
    vocabulary: int,
    classes: int | None = None,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    hidden: int | None = None,
    positions: int = 128,
    dropout: float = 0.1,
    seed: int = 0,
) -> ir.Model:
    """Build a BERT encoder with initial weights, for masked language modelling or classification.

    The result is standard ONNX in inference form. The embedding is the sum of a token's and its position's rows of two tables.
    Layers of attention over all tokens except padding, and of feed-forward networks with GELU, follow; each addition is followed
    by layer normalization.

    Without ``classes``, a dense layer with GELU and layer normalization gives a vector per token, and the logits are its products
    with the rows of the token table, which is *tied*: it is used at both ends. With ``classes``, a dense layer with tanh (the
    pooler) and another dense layer read the vector of the first token. The encoder's weights have the same names in both, so a
    classifier can start from a masked language model.

    Args:
        vocabulary: number of rows of the token table.
        classes: number of classes of a classifier; None for masked language modelling.
        width: size of a token's vector.
        layers: number of layers of attention and feed-forward network.
        heads: number of attention heads.
        hidden: width inside the feed-forward networks; by default four times ``width``.
        positions: length of the longest text, in tokens.
        dropout: share of values that training drops, in the embedding and in the output of each layer.
        seed: seed of the initial weights: normal with a standard deviation of 0.02, and zero biases.

    Returns:
        A model with the inputs ``input_ids`` and ``attention_mask`` (int64, [batch, tokens]; the mask is 0 at padding) and the
        output ``logits`` (float32): [batch, tokens, vocabulary], or [batch, classes].

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1, heads that do not divide the width, or a dropout
            outside [0, 1).
    """
    hidden = 4 * width if hidden is None else hidden
    sizes = {"vocabulary": vocabulary, "layers": layers, "hidden": hidden, "positions": positions}
    check_sizes("bert", heads, width, dropout, **sizes, **({} if classes is None else {"classes": classes}))
    network = Transformer("bert", width, heads, hidden, 1e-12, dropout, seed)
    builder = network.builder
    ids, mask = network.input("input_ids", ir.DataType.INT64, TOKENS), network.input("attention_mask", ir.DataType.INT64, TOKENS)
    table = network.drawn("embeddings.tokens", vocabulary, width)
    place = network.position(network.places(ids), positions)
    x = network.dropout(network.norm("embeddings.norm", builder.op("Gather", table, ids, axis=0) + place))
    is_padding = builder.op("Unsqueeze", builder.op("Equal", mask, 0), builder.integers([1, 2]))
    added = network.hidden_keys(is_padding)
    for layer in range(1, layers + 1):
        name = f"layers.{layer}"
        attended = network.attention(f"{name}.attention", x, added)
        x = network.norm(f"{name}.attention.norm", x + network.dropout(attended))
        x = network.norm(f"{name}.norm", x + network.dropout(network.feed_forward(name, x, "gelu")))
    if classes is None:
        return network.model(_gaps(network, x, table, vocabulary), TOKENS, vocabulary)
    return network.model(_classes(network, x, classes), classes)


def _gaps(network: Transformer, x: Tensor, table: Tensor, vocabulary: int) -> Tensor:
    x = network.activated(network.dense("head.dense", x, network.width, network.width), "gelu")
    return network.scores(network.norm("head.norm", x), table) + network.weight("head.bias", np.zeros(vocabulary))


def _classes(network: Transformer, x: Tensor, classes: int) -> Tensor:
    builder = network.builder
    first = builder.op("Gather", x, builder.scalar(0, ir.DataType.INT64), axis=1)
    pooled = builder.op("Tanh", network.dense("pooler", first, network.width, network.width))
    return network.dense("classifier", network.dropout(pooled), network.width, classes)
