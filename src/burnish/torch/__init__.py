"""The front towards PyTorch: ONNX models and modules that train inside of a PyTorch program, and weights back in modules.

What runs the graphs is the PyTorch engine (``burnish.engines.torch``); how a module becomes a graph is in
``burnish.importer.pytorch``.
"""

from burnish.torch.conversion import load_into, to_module
from burnish.torch.explanation import Explanation, explain
from burnish.torch.layer import Layer
from burnish.torch.wrapped import unwrap, wrap

__all__ = ["Explanation", "Layer", "explain", "load_into", "to_module", "unwrap", "wrap"]
