"""A small decoder that reads a mask and positions, as a file and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch
from torch.nn import functional

from burnish.models.transformer import TOKENS, Transformer

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 25, 8, 2, 2, 16
SIZE = WIDTH // HEADS


def masked_decoder(seed: int = 0, is_causal: bool = True) -> ir.Model:
    """Return a decoder with the inputs ``input_ids``, ``attention_mask`` and ``position_ids``, and a head of its own."""
    network = Transformer("decoder", WIDTH, HEADS, 2 * WIDTH, 1e-5, 0.0, seed)
    builder = network.builder
    names = ("input_ids", "attention_mask", "position_ids")
    ids, mask, positions = (network.input(name, ir.DataType.INT64, TOKENS) for name in names)
    x = builder.op("Gather", network.drawn("tokens.weight", VOCABULARY, WIDTH, deviation=0.5), ids, axis=0)
    x = x + builder.op("Gather", network.drawn("positions.weight", POSITIONS, WIDTH, deviation=0.5), positions, axis=0)
    added = network.hidden_keys(builder.op("Unsqueeze", builder.op("Equal", mask, 0), builder.integers([1, 2])))
    if is_causal:
        places = network.places(ids)
        added = added + network.hidden_keys(builder.op("Greater", places, builder.op("Unsqueeze", places, builder.integers([1]))))
        # Two of the lowest numbers are infinite together, and a row of these alone has no softmax.
        added = builder.op("Max", added, builder.scalar(float(np.finfo(np.float32).min), ir.DataType.FLOAT))
    for layer in range(LAYERS):
        attended = network.attention(f"{layer}.attention", network.norm(f"{layer}.attention.norm", x), added, 0.5)
        x = x + attended
        x = x + network.feed_forward(f"{layer}", network.norm(f"{layer}.norm", x), "gelu_tanh", 0.5)
    x = network.norm("norm", x)
    return network.model(network.scores(x, network.drawn("head.weight", VOCABULARY, WIDTH, deviation=0.5)), TOKENS, VOCABULARY)


def weights_of(model: ir.Model) -> dict[str, torch.Tensor]:
    """Return the floating-point weights of a model, as leaves that take gradients."""
    held = {name: value.const_value for name, value in model.graph.initializers.items()}
    arrays = {name: tensor.numpy() for name, tensor in held.items() if tensor is not None and tensor.dtype == ir.DataType.FLOAT}
    return {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items() if array.ndim}


def logits(w: Mapping[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the scores of the decoder [batch, tokens, vocabulary]."""
    x = w["tokens.weight"][ids] + w["positions.weight"][positions]
    count = ids.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool).tril()[None, None] & (mask != 0)[:, None, None, :]
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)

    def dense(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    for layer in range(LAYERS):
        normed, name = norm(f"{layer}.attention.norm", x), f"{layer}.attention"
        parts = (
            dense(f"{name}.{part}", normed).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for part in ("query", "key", "value")
        )
        query, key, value = parts
        shares = (query @ key.transpose(2, 3) / SIZE**0.5 + added).softmax(-1)
        x = x + dense(f"{name}.output", (shares @ value).transpose(1, 2).flatten(2))
        wide = functional.gelu(dense(f"{layer}.up", norm(f"{layer}.norm", x)), approximate="tanh")
        x = x + dense(f"{layer}.down", wide)
    return norm("norm", x) @ w["head.weight"].T


def loss_of_labels(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of Hugging Face's causal models: labels are the tokens or -100, and are shifted here."""
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
