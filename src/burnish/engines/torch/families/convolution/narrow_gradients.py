"""Gradients of convolutions in bfloat16 on a CPU, by the engine's own kernel or as products, where these are the fastest.

The kernel (``convolution_weights_bfloat16.cpp``) computes gradients of the weights. The gradient of the images of a
convolution of one pixel with strides is a product of what it has seen; zeros are around that. The functions are called as a graph
runs, when the sizes are known; where neither was measured to win, oneDNN computes the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burnish.engines.torch.families.convolution import onednn
from burnish.engines.torch.families.images import pixels_of
from burnish.engines.torch.families.thresholds import NarrowConvolutions
from burnish.engines.torch.native import kernels
from burnish.engines.torch.translate.rules import records_one_call

KERNEL = "convolution_weight_gradient_bfloat16"

WIDEST = 256
"""Pixels of a result's rows up to which whole rows are taken at a time; wider ones would not stay in the caches."""

PANEL = 32
"""Channels that the kernel takes at a time: with others, it multiplies zeros."""


def expect_weight_gradient() -> None:
    """Have the kernel built meanwhile."""
    kernels.request("convolution_weights_bfloat16")


@records_one_call
def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, strides: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """dy [N, K, H', W'] and x [N, C, H, W] of a convolution with these strides and padding to dw [K, C, h, w].

    Args:
        dy: the gradient of the convolution's results, bfloat16.
        x: its images, bfloat16.
        weight: its kernels, of which the shape is read.
        strides: of both axes.
        padding: of both axes, on either side.
    """
    extents = weight.shape[2:]
    own = kernels.find_operator(KERNEL) if _is_fast(dy, x, extents, strides, padding) else None
    if own is not None:
        return own(dy, x, list(extents), list(strides), list(padding))
    height, width = x.shape[2:]
    if [*extents, *strides, *padding] == [1, 1, 1, 1, 0, 0] and height * width <= NarrowConvolutions.LARGEST_MAP_OF_GRADIENT:
        return torch.mm(pixels_of(dy).t(), pixels_of(x))[:, :, None, None]
    return onednn.gradient(dy, x, weight, strides, padding, "kernels")


@records_one_call
def strided_input_gradient(dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """dy [N, K, H', W'] and weight [K, C, 1, 1] of a convolution with strides and no padding to dx [N, C, H, W].

    Args:
        dy: the gradient of the convolution's results, bfloat16.
        weight: its kernels, bfloat16.
        x: its images, of which the shape is read.
        strides: of both axes.
    """
    outputs, channels = weight.shape[:2]
    if min(outputs, channels) < NarrowConvolutions.LEAST_CHANNELS or dy.numel() == 0:
        return onednn.gradient(dy, x, weight, strides, [0, 0], "images")
    count, _, height, width = dy.shape
    seen = torch.mm(pixels_of(dy), weight.flatten(1)).view(count, height, width, channels)
    dx = torch.zeros([count, *x.shape[2:], channels], dtype=dy.dtype)
    dx[:, :: strides[0], :: strides[1]] = seen
    return dx.permute(0, 3, 1, 2)


def _is_fast(dy: torch.Tensor, x: torch.Tensor, extents: Sequence[int], strides: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the engine's own kernel computes the gradient of the weights the fastest."""
    outputs, channels, count = dy.shape[1], x.shape[1], dy.shape[0]
    if (
        dy.shape[3] > WIDEST
        or not dy.is_contiguous(memory_format=torch.channels_last)
        or not x.is_contiguous(memory_format=torch.channels_last)
    ):
        return False
    if [*extents, *padding] != [1, 1, 0, 0]:
        pairs, filled = -(-count // 2), -(-channels // PANEL) * PANEL
        return (
            min(outputs, channels) >= NarrowConvolutions.LEAST_CHANNELS
            and 2 * pairs <= NarrowConvolutions.MOST_PAIRED * count
            and channels > NarrowConvolutions.LEAST_FILLED * filled
        )
    if min(outputs, channels) < NarrowConvolutions.LEAST_CHANNELS_OF_ONE_PIXEL:
        return False
    of_matrices = x.shape[2] * x.shape[3] <= NarrowConvolutions.LARGEST_MAP_OF_GRADIENT
    fewest = NarrowConvolutions.FEWEST_PIXELS if of_matrices else NarrowConvolutions.FEWEST_PIXELS_OF_LARGE_MAPS
    return [*strides] != [1, 1] or count * dy.shape[2] * dy.shape[3] >= fewest
