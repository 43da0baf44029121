"""How near sums that a kernel of float32 computes have to be."""

from __future__ import annotations

import torch


def within_float32(found: torch.Tensor, terms: torch.Tensor, axes: list[int]) -> bool:
    """Whether sums of float64 terms are as near as their rounding, and that of sums of sixteen, lets them be."""
    bound = 2.0**-24 * (16 * terms.abs().sum(axes) / 4 + terms.sum(axes).abs()) + 1e-45
    return bool(((found.double() - terms.sum(axes)).abs() <= bound).all())
