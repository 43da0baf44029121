"""Exchanges with other workers, and the kernels by which those of one machine share memory."""

from burnish.engines.torch.families.exchange import schemas  # noqa: F401  # declares the kernels
