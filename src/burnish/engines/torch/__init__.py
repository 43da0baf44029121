"""The PyTorch engine: the same program, run by PyTorch's kernels without its autograd.

``translation`` turns an ONNX graph into a ``torch.fx`` graph of ATen operators, by the rules in ``operators``, which ``rules``
registers; ``fusions`` puts calls of this engine's own ``kernels`` into graphs before; ``host`` keeps the arithmetic of shapes out
of tensors; ``engine`` holds the state and runs the steps. What an operator means and how it is differentiated lives in
``burnish.ops``, not here.
"""

from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.rules import translates

__all__ = ["TorchEngine", "translates"]
