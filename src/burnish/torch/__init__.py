"""The front towards PyTorch: ONNX models and modules that train inside of a PyTorch program.

What runs the graphs is the PyTorch engine (``burnish.engines.torch``); how a module becomes a graph is in
``burnish.importer.pytorch``.
"""

from burnish.torch.layer import Layer
from burnish.torch.wrapped import unwrap, wrap

__all__ = ["Layer", "unwrap", "wrap"]
