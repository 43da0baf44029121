"""Group and instance normalization with their activation, by the engine's own kernels."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.rules import Call, translates
from burnish.graph import BURNISH_DOMAIN


@translates("FusedGroupNorm", domain=BURNISH_DOMAIN)
def group_norm(op: Call) -> Any:
    """(x, scale, bias) -> y, mean, inverse deviation, shift."""
    results = torch.ops.burnish.group_norm.default(
        *op.tensors(), op.attribute("num_groups"), op.attribute("epsilon"), op.attribute("activation"), op.attribute("limit")
    )
    return tuple(results[index] for index in range(4))


@translates("FusedGroupNormGrad", domain=BURNISH_DOMAIN)
def group_norm_gradient(op: Call) -> Any:
    """(dy, x, scale, bias, mean, inverse deviation, shift) -> dx, dscale, dbias."""
    results = torch.ops.burnish.group_norm_gradient.default(
        *op.tensors(), op.attribute("num_groups"), op.attribute("activation"), op.attribute("limit")
    )
    return tuple(results[index] for index in range(3))
