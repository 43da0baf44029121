"""Normalization layers: one file per layer, and the statistics they share.

What a batch normalization does with its running statistics is decided in ``burnish.modes`` and ``burnish.norms``.
"""

from burnish.operators.normalization import (  # noqa: F401  # registers the rules
    batch,
    ghost,
    group,
    group_training,
    layer,
    local_response,
    lp,
    renorm,
    standardize,
    synchronized,
)
from burnish.operators.normalization.batch import batch_norm_training
from burnish.operators.normalization.statistics import elements_per_channel

__all__ = [
    "batch_norm_training",
    "elements_per_channel",
]
