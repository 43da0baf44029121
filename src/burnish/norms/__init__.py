"""Normalization layers for users: the policies that they train by, and what else can be done to the layers of a model.

Here live the tools, and the public names of the policies, which are made in ``burnish.norm_policies``. The mathematics of the
layers is in ``burnish.ops.normalization``.
"""

from burnish.norm_policies import (
    POLICIES,
    Auto,
    BatchStatistics,
    ExtentRule,
    Frozen,
    Ghost,
    Local,
    NormPolicy,
    Renorm,
    RunningVariance,
    Sync,
    Train,
    check_layer,
    default_running_variance,
    extent_rules,
    get,
    layer_name,
    layer_names,
    resolve_policies,
)
from burnish.norms.convert import convert
from burnish.norms.insert import insert, unfold
from burnish.norms.recalibrate import recalibrate
from burnish.norms.weight_normalization import weight_normalize

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
