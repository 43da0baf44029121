"""The gradients of a convolution as PyTorch computes them, by oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch


def gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    of: Literal["images", "kernels"],
) -> torch.Tensor:
    """The gradient of the images x [N, C, H, W], or of the kernels weight [K, C, h, w]; of what it is of the shape is read.

    The convolution is without dilation and in one group.
    """
    is_of_images = of == "images"
    if is_of_images and x.dtype != dy.dtype:
        x = torch.empty_like(x, dtype=dy.dtype)
    if not is_of_images and weight.dtype != dy.dtype:
        weight = torch.empty_like(weight, dtype=dy.dtype)
    wanted = [is_of_images, not is_of_images, False]
    gradients = torch.ops.aten.convolution_backward.default(
        dy, x, weight, None, strides, padding, [1, 1], False, [0, 0], 1, wanted
    )
    return gradients[0 if is_of_images else 1]
