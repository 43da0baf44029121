"""Softmax cross-entropy over class indices: the operators that a graph pass puts in its place.

``saved`` [N, 2] holds of each row what the gradient reads: the largest logit, and the logarithm of the sum of the exponentials of
the logits less that (``cross_entropy.h``).
"""

from burnish.kernels.engine_operator import EngineOperator

FUSED_CROSS_ENTROPY = EngineOperator("FusedCrossEntropy", ("logits", "labels"), ("total", "counted", "saved"))
FUSED_CROSS_ENTROPY_GRAD = EngineOperator("FusedCrossEntropyGrad", ("logits", "labels", "saved", "flow"), ("dlogits",))
