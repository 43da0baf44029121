"""1x1 convolutions, and gradients in bfloat16, by the engine's own kernels or as matrix products, chosen at run time.

For few pixels, matrix products beat oneDNN's convolutions, which reorder their kernels each time; the engine's own kernel does so
for many pixels and enough output channels. In bfloat16, the kernel ``convolution_weights_bfloat16.cpp`` computes gradients of the
weights. The input gradient of a strided 1x1 convolution is a product at the pixels that it read, surrounded by zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings import linear
from burnish.engines.torch.bindings.calls import pixels_of
from burnish.engines.torch.translate.rules import records_one_call
from burnish.kernels.thresholds import NarrowConvolutions, Pointwise


def onednn_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    of: Literal["images", "kernels"],
) -> torch.Tensor:
    """Return the gradient of images x [N, C, H, W] or of kernels weight [K, C, h, w], whose values are not read, only the shape.

    The convolution has no dilation and one group.
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


def expect() -> None:
    """Start to build the kernel in the background if 1x1 convolutions will use it."""
    if linear.suits(torch.float32, "product") and not torch.cpu._is_avx512_supported():
        kernels.request("products")


@records_one_call
def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strides: Sequence[int]) -> torch.Tensor:
    """Convolve images [N, C, H, W] with kernels [K, C, 1, 1], without padding."""
    seen = x[:, :, :: strides[0], :: strides[1]]
    result = _pixel_product(seen, weight.flatten(1), bias)
    return functional.conv2d(x, weight, bias, list(strides)) if result is None else result


@records_one_call
def input_gradient(dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the input gradient of such a convolution for that of its results; only the shape of x is read."""
    seen = _pixel_product(dy, weight.flatten(1).t(), None)
    if seen is None:
        return onednn_gradient(dy, x, weight, strides, [0, 0], "images")
    if seen.shape == x.shape:
        return seen
    dx = torch.zeros(x.shape, dtype=dy.dtype, device=x.device).to(memory_format=torch.channels_last)
    dx[:, :, :: strides[0], :: strides[1]] = seen
    return dx


def expect_gradients() -> None:
    """Start to build the kernels for both gradients of such convolutions in the background."""
    kernels.request("pointwise_gradient", "winograd_weights")
    expect()


@records_one_call
def gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dx, dw of such a convolution with a stride of 1 for dy [N, K, H, W], x [N, C, H, W], weight [K, C, 1, 1]."""
    outputs, channels = weight.shape[:2]
    pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
    many = pixels >= Pointwise.LEAST_PIXELS * torch.get_num_threads()
    if many and outputs * channels <= Pointwise.MOST_WEIGHTS and max(outputs, channels) >= Pointwise.LEAST_OF_WIDER:
        own = kernels.find_operator("pointwise_gradient")
        if own is not None:
            return own(dy, x, weight)
    dx = input_gradient(dy, weight, x, [1, 1])
    if _has_large_weights(pixels, outputs, channels):
        own = linear.own_kernel(dy.dtype, "product")
        if own is not None:
            return dx, own(pixels_of(dy).t(), pixels_of(x), None).view(weight.shape)
    own = kernels.find_operator("convolution_weight_gradient") if min(outputs, channels) >= Pointwise.LEAST_OF_NARROWER else None
    if own is not None:
        return dx, own(dy, x, [1, 1], [1, 1], [0, 0])
    return dx, onednn_gradient(dy, x, weight, [1, 1], [0, 0], "kernels")


def _pixel_product(images: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return images [N, C, H, W] times kernel' [C, K] per pixel, plus bias [K], if a product is fastest; else None."""
    outputs, inputs = kernel.shape
    count, _, height, width = images.shape
    pixels = count * height * width
    if images.dtype == torch.float32 and _has_fast_pixels(pixels, inputs, outputs):
        own = linear.own_kernel(images.dtype, "product")
        if own is not None:
            return own(pixels_of(images), kernel.t(), bias).view(count, height, width, outputs).permute(0, 3, 1, 2)
    multiply = linear.onednn_product() if 0 < pixels <= Pointwise.MOST_PIXELS and torch.backends.mkldnn.enabled else None
    if multiply is None:
        return None
    if bias is not None:
        # oneDNN ignores strides: from a broadcast bias, it would read the memory after it.
        bias = bias.contiguous()
    return multiply(images.permute(0, 2, 3, 1), kernel, bias, "none", [], "").permute(0, 3, 1, 2)


def _has_fast_pixels(pixels: int, inputs: int, outputs: int) -> bool:
    if torch.cpu._is_avx512_supported() or pixels < Pointwise.FEWEST_PIXELS or outputs < Pointwise.FEWEST_CHANNELS:
        return False
    return pixels <= Pointwise.MOST_PIXELS or outputs >= min(inputs, Pointwise.ENOUGH_CHANNELS)


def _has_large_weights(pixels: int, outputs: int, inputs: int) -> bool:
    return (
        not torch.cpu._is_avx512_supported() and pixels >= Pointwise.FEWEST_PIXELS and outputs * inputs > Pointwise.MOST_WEIGHTS
    )


KERNEL = "convolution_weight_gradient_bfloat16"

WIDEST = 256
"""The width of results up to which whole rows are processed at a time; wider ones would not stay in the caches."""

PANEL = 32
"""The number of channels that the kernel processes at a time: with others, it multiplies zeros."""


def expect_weight_gradient() -> None:
    """Start to build the kernel in the background."""
    kernels.request("convolution_weights_bfloat16")


@records_one_call
def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, strides: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """Return dw [K, C, h, w] of a convolution for dy [N, K, H', W'] and x [N, C, H, W].

    Args:
        dy: gradient of the convolution's results, bfloat16.
        x: images, bfloat16.
        weight: kernels; only the shape is read.
        strides: strides of both axes.
        padding: padding of both axes, on either side.
    """
    extents = weight.shape[2:]
    own = kernels.find_operator(KERNEL) if _is_fast(dy, x, extents, strides, padding) else None
    if own is not None:
        return own(dy, x, list(extents), list(strides), list(padding))
    height, width = x.shape[2:]
    if [*extents, *strides, *padding] == [1, 1, 1, 1, 0, 0] and height * width <= NarrowConvolutions.LARGEST_MAP_OF_GRADIENT:
        return torch.mm(pixels_of(dy).t(), pixels_of(x))[:, :, None, None]
    return onednn_gradient(dy, x, weight, strides, padding, "kernels")


@records_one_call
def strided_input_gradient(dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return dx [N, C, H, W] of a strided convolution without padding for dy [N, K, H', W'] and weight [K, C, 1, 1].

    Args:
        dy: gradient of the convolution's results, bfloat16.
        weight: kernels, bfloat16.
        x: images; only the shape is read.
        strides: strides of both axes.
    """
    outputs, channels = weight.shape[:2]
    if min(outputs, channels) < NarrowConvolutions.LEAST_CHANNELS or dy.numel() == 0:
        return onednn_gradient(dy, x, weight, strides, [0, 0], "images")
    count, _, height, width = dy.shape
    seen = torch.mm(pixels_of(dy), weight.flatten(1)).view(count, height, width, channels)
    dx = torch.zeros([count, *x.shape[2:], channels], dtype=dy.dtype)
    dx[:, :: strides[0], :: strides[1]] = seen
    return dx.permute(0, 3, 1, 2)


def _is_fast(dy: torch.Tensor, x: torch.Tensor, extents: Sequence[int], strides: Sequence[int], padding: Sequence[int]) -> bool:
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
