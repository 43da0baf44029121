"""Normalization policies: what each batch normalization layer does during training, and what can be done to the layers.

The mathematics of the layers is in ``burnish.ops.normalization``; a policy is put into a graph by ``burnish.modes``.
"""

from burnish.norms.policies import (
    POLICIES,
    BatchStatistics,
    Frozen,
    Ghost,
    NormPolicy,
    Renorm,
    RunningVariance,
    Sync,
    Train,
    default_running_variance,
    get,
    layer_name,
    layer_names,
    resolve_policies,
)
from burnish.norms.requirements import ExtentRule, check_layer, extent_rules

__all__ = [
    "POLICIES",
    "BatchStatistics",
    "ExtentRule",
    "Frozen",
    "Ghost",
    "NormPolicy",
    "Renorm",
    "RunningVariance",
    "Sync",
    "Train",
    "check_layer",
    "default_running_variance",
    "extent_rules",
    "get",
    "layer_name",
    "layer_names",
    "resolve_policies",
]
