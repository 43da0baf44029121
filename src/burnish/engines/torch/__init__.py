"""The PyTorch engine: runs the same program with PyTorch's kernels, without its autograd.

``engine`` holds the state and runs the steps. The passes of ``fusion`` put calls of the engine's own kernels into a graph
(``burnish.kernels``, described in ``bindings``), and ``translate`` turns it into a ``torch.fx`` graph of ATen operators.
``native`` builds and loads the kernels; ``runtime`` runs the graph. The meaning of operators and their derivatives are in
``burnish.operators``.
"""

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.rules import translates

__all__ = ["TorchEngine", "translates"]
