"""Batch normalization layers in training: policies, their requirements on a batch, and the next running statistics.

The mathematics of the layers is in ``burnish.operators.normalization``; ``burnish.modes`` puts a policy into a graph.
``burnish.surgery`` changes the layers of a model, for example by conversion.
"""

from burnish.norms.policies import (
    CUMULATIVE,
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
    norm_without_effect,
    resolve_policies,
)
from burnish.norms.requirements import (
    ExtentRule,
    check_layer,
    computes_statistics,
    extent_rules,
    frozen_by_mode,
    never_updated,
    normalizes_by_batch,
    uses_the_batch,
)

__all__ = [
    "CUMULATIVE",
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
    "computes_statistics",
    "default_running_variance",
    "extent_rules",
    "frozen_by_mode",
    "get",
    "layer_name",
    "layer_names",
    "matches_layer",
    "never_updated",
    "norm_without_effect",
    "normalizes_by_batch",
    "resolve_policies",
    "uses_the_batch",
]
