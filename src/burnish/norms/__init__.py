"""Normalization policies: what each batch normalization layer does during training, and what can be done to the layers.

The mathematics of the layers is in ``burnish.ops.normalization``; a policy is put into a graph by ``burnish.modes``.
"""

from burnish.norms.convert import convert
from burnish.norms.insert import insert, unfold
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
from burnish.norms.recalibrate import recalibrate
from burnish.norms.requirements import ExtentRule, check_layer, extent_rules
from burnish.norms.weight_normalization import weight_normalize

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
    "convert",
    "default_running_variance",
    "extent_rules",
    "get",
    "insert",
    "layer_name",
    "layer_names",
    "recalibrate",
    "resolve_policies",
    "unfold",
    "weight_normalize",
]
