"""All operators with a translation to PyTorch: importing this module registers the rules and the bindings."""

from burnish.engines.torch.bindings import (
    attention,
    convolution,
    elementwise,
    embedding,
    exchange,
    linear,
    normalization,
    pooling,
    precision,
    recurrent,
    resize,
    softmax,
)
from burnish.engines.torch.bindings import exchange as rows
from burnish.engines.torch.translate import operators as plain
from burnish.engines.torch.translate import splitting

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "embedding",
    "exchange",
    "linear",
    "normalization",
    "plain",
    "pooling",
    "precision",
    "recurrent",
    "resize",
    "rows",
    "softmax",
    "splitting",
]
