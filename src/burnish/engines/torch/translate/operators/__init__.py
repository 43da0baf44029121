"""Translations of plain ONNX operators: one module per kind; importing this package registers them all.

A rule calls PyTorch's functions on proxies (``burnish.engines.torch.translate.rules``). Operators of the ``burnish`` domain that
have a rule here or in a family are not lowered for this engine.
"""

from burnish.engines.torch.translate.operators import (
    activation,
    control,
    elementwise,
    images,
    indexing,
    normalization,
    random,
    reduction,
    sequences,
    shape,
    signal,
)

__all__ = [
    "activation",
    "control",
    "elementwise",
    "images",
    "indexing",
    "normalization",
    "random",
    "reduction",
    "sequences",
    "shape",
    "signal",
]
