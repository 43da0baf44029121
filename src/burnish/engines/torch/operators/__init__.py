"""What each ONNX operator becomes in PyTorch: one module per family; importing this package registers them all.

A rule calls PyTorch's functions on proxies (``burnish.engines.torch.rules``). Operators of the ``burnish`` domain that
have a rule here are not lowered for this engine.
"""

from burnish.engines.torch.operators import (
    activation,
    collective,
    control,
    convolution,
    elementwise,
    fused,
    group_normalization,
    indexing,
    loss,
    matmul,
    normalization,
    pooling,
    random,
    recurrent,
    reduction,
    resize,
    shape,
    signal,
)

__all__ = [
    "activation",
    "collective",
    "control",
    "convolution",
    "elementwise",
    "fused",
    "group_normalization",
    "indexing",
    "loss",
    "matmul",
    "normalization",
    "pooling",
    "random",
    "recurrent",
    "reduction",
    "resize",
    "shape",
    "signal",
]
