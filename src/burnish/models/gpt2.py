"""A GPT-2 decoder, after Radford et al. 2019, "Language models are unsupervised multitask learners"."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.models.transformer import DEVIATION, TOKENS, Transformer, check_sizes


def gpt2(
    vocabulary: int,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    hidden: int | None = None,
    positions: int = 128,
    dropout: float = 0.1,
    tied: bool = True,
    seed: int = 0,
) -> ir.Model:
    """Build a GPT-2 decoder for next-token prediction in standard ONNX, in inference form, with initial weights.

    The embedding is the sum of a token's and its position's rows of two tables. Layers of causal attention, and of feed-forward
    networks with GELU (the tanh approximation), follow, each after a layer normalization; a last layer normalization comes at the
    end. The logits are products with the rows of the token table, or of a separate head.

    It needs no mask: padding comes after a text, and causal attention does not look ahead.

    Args:
        vocabulary: number of rows of the token table.
        width: size of a token's vector.
        layers: number of layers of attention and feed-forward network.
        heads: number of attention heads.
        hidden: width inside the feed-forward networks; by default four times ``width``.
        positions: length of the longest text, in tokens.
        dropout: share of values that training drops, in the embedding and in the output of each layer.
        tied: True to use the token table as the head too; its gradient is then of all rows (``compile(sparse=...)``).
        seed: seed of the initial weights: normal with a standard deviation of 0.02, or 0.02 / sqrt(2 layers) in the last matrix
            of each residual branch, and zero biases.

    Returns:
        A model with the input ``input_ids`` (int64, [batch, tokens]) and the output ``logits`` (float32, [batch, tokens,
        vocabulary]), the scores of the next token at each position.

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1, heads that do not divide the width, or a dropout
            outside [0, 1).
    """
    hidden = 4 * width if hidden is None else hidden
    sizes = {"vocabulary": vocabulary, "layers": layers, "hidden": hidden, "positions": positions}
    check_sizes("gpt2", heads, width, dropout, **sizes)
    network = Transformer("gpt2", width, heads, hidden, 1e-5, dropout, seed)
    builder = network.builder
    ids = network.input("input_ids", ir.DataType.INT64, TOKENS)
    table = network.drawn("embeddings.tokens", vocabulary, width)
    places = network.places(ids)
    place = network.position(places, positions)
    x = network.dropout(builder.op("Gather", table, ids, axis=0) + place)
    comes_after = builder.op("Greater", places, builder.op("Unsqueeze", places, builder.integers([1])))
    added = network.hidden_keys(comes_after)
    added_by_layers = DEVIATION / float(np.sqrt(2 * layers))
    for layer in range(1, layers + 1):
        name = f"layers.{layer}"
        normed = network.norm(f"{name}.attention.norm", x)
        x = x + network.dropout(network.attention(f"{name}.attention", normed, added, added_by_layers))
        normed = network.norm(f"{name}.norm", x)
        x = x + network.dropout(network.feed_forward(name, normed, "gelu_tanh", added_by_layers))
    x = network.norm("norm", x)
    return network.model(
        network.scores(x, table if tied else network.drawn("head.weight", vocabulary, width)), TOKENS, vocabulary
    )
