"""Batch, group and row normalization with the activation and the addition around it."""

from burnish.engines.torch.families.normalization import schemas  # noqa: F401  # declares the kernels
