"""Scaled dot-product attention without a matrix of probabilities."""

from burnish.engines.torch.families.attention import schemas  # noqa: F401  # declares the kernels
