"""What each batch normalization layer does during training: policies, what they ask of a batch, and how statistics move on.

The mathematics of the layers is in ``burnish.ops.normalization``; a policy is put into a graph by ``burnish.modes``. What is done
to the layers of a model, such as conversion, is in ``burnish.surgery``.
"""

from burnish.norms.policies import (
    POLICIES,
    Auto,
    BatchStatistics,
    Frozen,
    Ghost,
    Local,
    NormPolicy,
    Renorm,
    RunningVariance,
    Sync,
    Train,
    default_running_variance,
    get,
    layer_name,
    layer_names,
    matches_layer,
    resolve_policies,
)
from burnish.norms.requirements import ExtentRule, check_layer, extent_rules

__all__ = [
    "POLICIES",
    "Auto",
    "BatchStatistics",
    "ExtentRule",
    "Frozen",
    "Ghost",
    "Local",
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
    "matches_layer",
    "resolve_policies",
]
