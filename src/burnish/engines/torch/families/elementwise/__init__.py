"""Chains of elementwise arithmetic, each in one pass over memory."""

from burnish.engines.torch.families.elementwise import schemas  # noqa: F401  # declares the kernels
