"""The PyTorch engine: runs the same program with PyTorch's kernels, without its autograd.

``engine`` holds the state and runs the steps, ``fusion`` inserts the engine's own kernels (``burnish.kernels``, ``bindings``),
``translate`` makes a ``torch.fx`` graph of ATen operators, ``native`` builds the kernels, and ``runtime`` runs the graph. The
meaning of operators and their derivatives are in ``burnish.operators``.
"""

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.rules import translates

__all__ = ["TorchEngine", "translates"]
