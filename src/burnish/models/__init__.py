"""Models shipped with burnish: plain ONNX, emitted with the builder, without PyTorch.

A model here is an inference graph with weights, as a user would bring one. How it is trained lives elsewhere.
"""

from burnish.models.bert import bert
from burnish.models.dlrm import dlrm
from burnish.models.gpt2 import gpt2
from burnish.models.residual import residual_network

__all__ = ["bert", "dlrm", "gpt2", "residual_network"]
