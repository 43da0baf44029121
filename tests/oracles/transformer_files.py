"""Small transformers in the form of the best known implementations, which ONNX Runtime's optimizer looks for, as exports."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, LONGEST = 32, 4, 2, 30, 12


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.size(0), x.size(1), HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, causal: torch.Tensor | None = None
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
    if causal is not None:
        places = scores.size(-1)
        scores = torch.where(causal[:, :, :places, :places], scores, torch.tensor(-10000.0))
    context = torch.matmul(nn.functional.softmax(scores + mask, dim=-1), v).permute(0, 2, 1, 3).contiguous()
    return context.view(context.size(0), context.size(1), WIDTH)


def added_mask(mask: torch.Tensor) -> torch.Tensor:
    return (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = (nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = attend(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), mask)
        x = self.first(self.dense(attended) + x)
        return self.second(self.down(nn.functional.gelu(self.up(x))) + x)


class Encoder(nn.Module):
    """As BERT, with a classifier."""

    names = ("input_ids", "attention_mask", "token_type_ids")

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.segments = (nn.Embedding(rows, WIDTH) for rows in (VOCABULARY, LONGEST, 2))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.pooler, self.classifier = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("position_ids", torch.arange(LONGEST).expand(1, -1))

    def forward(self, words: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        added = added_mask(mask)
        x = self.words(words) + self.segments(segments)
        x = self.norm(x + self.places(self.position_ids[:, : words.size(1)]))
        for layer in self.layers:
            x = layer(x, added)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class Projection(nn.Module):
    """A linear layer with its matrix the other way round."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(rows, columns)), nn.Parameter(torch.empty(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return product.view(x.size(0), x.size(1), self.bias.size(0))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = Projection(3 * WIDTH, WIDTH), Projection(WIDTH, WIDTH)
        self.up, self.down = Projection(2 * WIDTH, WIDTH), Projection(WIDTH, 2 * WIDTH)
        self.register_buffer("causal", torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool))[None, None])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.first(x)).split(WIDTH, dim=2)
        x = x + self.out(attend(heads(q), heads(k), heads(v), mask, self.causal))
        y = self.up(self.second(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.down(y)


class Decoder(nn.Module):
    """As GPT-2, with a head of its own."""

    names = ("input_ids", "attention_mask")

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.size(1)).unsqueeze(0))
        added = added_mask(mask)
        for layer in self.layers:
            x = layer(x, added)
        return self.head(self.norm(x))


class Images(nn.Module):
    """Convolutions with what ONNX Runtime fuses into them."""

    names = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.hidden, self.classifier = nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        y = nn.functional.leaky_relu(self.second(x), 0.1) + x
        return self.classifier(torch.relu(self.hidden(torch.sigmoid(y).mean((2, 3)))))


def export(module: nn.Module, folder: Path, *examples: torch.Tensor) -> Path:
    """Write the module with weights drawn from one seed, and all that varies in the examples' first two axes left open."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    path = folder / f"{type(module).__name__.lower()}.onnx"
    axes = {
        name: {0: "batch"} | ({1: "sequence"} if x.dim() == 2 else {}) for name, x in zip(module.names, examples, strict=True)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            examples,
            path,
            input_names=list(module.names),
            output_names=["logits"],
            dynamic_axes=axes,
            opset_version=14,
            dynamo=False,
        )
    return path
