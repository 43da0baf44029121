"""The gradients of softmax and its logarithm, and cross-entropy of class indices."""

from burnish.engines.torch.families.softmax import schemas  # noqa: F401  # declares the kernels
