"""Signals and volumes as images: what kernels take that walk over images with their channels last.

A signal [N, C, L] is an image of one row, a volume [N, C, D, H, W] one of all its rows. Both are views where the channels are
last in memory, and so is what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SIGNAL, VOLUME = 3, 5
"""Ranks of these tensors."""


def as_image(tensor: Any, rank: int) -> Any:
    """[N, C, L] as [N, C, 1, L], [N, C, D, H, W] as [N, C, D * H, W]; anything of another rank as it is."""
    if rank == SIGNAL:
        return torch.unsqueeze(tensor, 2)
    return torch.flatten(tensor, 2, 3) if rank == VOLUME else tensor


def from_image(image: Any, extents: Sequence[Any]) -> Any:
    """The tensor of these extents that ``as_image`` made an image of."""
    if len(extents) == SIGNAL:
        return torch.squeeze(image, 2)
    return torch.unflatten(image, 2, list(extents[2:4])) if len(extents) == VOLUME else image


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    """Images [N, C, H, W] as a matrix [N * H * W, C]."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])
