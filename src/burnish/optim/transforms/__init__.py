"""Gradient transforms: pure graph builders ``(gradients, parameters, state) -> (gradients', state')``, one file each.

``chain`` puts them before an optimizer. What changes when or which parameters are updated lives beside this folder.
"""

from __future__ import annotations

from burnish.optim.transforms.base import GradientTransform
from burnish.optim.transforms.centralize import Centralize, centralize
from burnish.optim.transforms.chain import TRANSFORMS, Chain, chain
from burnish.optim.transforms.clip_by_global_norm import ClipByGlobalNorm, clip_by_global_norm
from burnish.optim.transforms.clip_by_norm import ClipByNorm, clip_by_norm
from burnish.optim.transforms.clip_by_value import ClipByValue, clip_by_value
from burnish.optim.transforms.decayed_weights import AddDecayedWeights, add_decayed_weights

__all__ = [
    "TRANSFORMS",
    "AddDecayedWeights",
    "Centralize",
    "Chain",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "GradientTransform",
    "add_decayed_weights",
    "centralize",
    "chain",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
]
