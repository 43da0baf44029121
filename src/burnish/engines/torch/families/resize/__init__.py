"""Resize and its gradient."""

from burnish.engines.torch.families.resize import fusion, schemas  # noqa: F401  # declare the kernels and what they replace
