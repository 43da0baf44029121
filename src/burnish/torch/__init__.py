"""The PyTorch front end: train ONNX models and modules inside a PyTorch program, and copy weights back into modules.

``burnish.engines.torch`` runs the graphs; ``burnish.importer.pytorch`` turns modules into graphs.
"""

from burnish.torch.conversion import load_into, to_module
from burnish.torch.explanation import Explanation, explain
from burnish.torch.layer import Layer
from burnish.torch.wrapped import unwrap, wrap

__all__ = ["Explanation", "Layer", "explain", "load_into", "to_module", "unwrap", "wrap"]
