"""Batch, group and row normalization with the activation and the addition around it."""

from burnish.engines.torch.families.normalization import (  # noqa: F401  # declare the kernels and what they replace
    local_response,
    schemas,
)
