"""Products with a weight and their gradients, and products of batches."""

from burnish.engines.torch.families.linear import schemas  # noqa: F401  # declares the kernels
