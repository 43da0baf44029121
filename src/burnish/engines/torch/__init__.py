"""The PyTorch engine: the same program, run by PyTorch's kernels without its autograd.

``engine`` holds the state and runs the steps. A graph goes through ``fusion``, whose passes put calls of the engine's own kernels
into it (``burnish.kernels``; ``bindings`` say what these calls are), and through ``translate``, which makes a ``torch.fx`` graph
of ATen operators of it. ``native`` builds and loads the kernels; ``runtime`` is what a graph runs in. What an operator means and
how it is differentiated lives in ``burnish.operators``, not here.
"""

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.translate.rules import translates

__all__ = ["TorchEngine", "translates"]
