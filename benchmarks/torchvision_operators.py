"""Torchvision's operators, declared for environments in which its compiled ones cannot be loaded."""

from __future__ import annotations

from functools import cache

import torch


@cache
def declare_torchvision_operators() -> torch.library.Library:
    """Let torchvision import where its compiled operators cannot be loaded; no model that is trained here calls them."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return library
