"""Convolutions of one pixel as products, where these are the fastest.

Where there are few pixels, products of matrices beat oneDNN's convolutions, which reorder their kernels each time; the engine's
own kernel does so with many pixels and enough channels of the result. The functions are called as a graph runs, when the sizes
are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from burnish.engines.torch.families.convolution import onednn
from burnish.engines.torch.families.images import pixels_of
from burnish.engines.torch.families.linear import products
from burnish.engines.torch.families.thresholds import Pointwise
from burnish.engines.torch.native import kernels
from burnish.engines.torch.translate.rules import records_one_call


def expect() -> None:
    """Have the kernel built meanwhile, where convolutions of one pixel will ask for it."""
    if products.suits(torch.float32, "product") and not torch.cpu._is_avx512_supported():
        kernels.request("products")


@records_one_call
def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strides: Sequence[int]) -> torch.Tensor:
    """The convolution of images [N, C, H, W] with kernels [K, C, 1, 1], without padding."""
    seen = x[:, :, :: strides[0], :: strides[1]]
    result = _pixel_product(seen, weight.flatten(1), bias)
    return functional.conv2d(x, weight, bias, list(strides)) if result is None else result


@records_one_call
def input_gradient(dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The gradient of the images of such a convolution, from that of its results; of x the shape is read."""
    seen = _pixel_product(dy, weight.flatten(1).t(), None)
    if seen is None:
        return onednn.gradient(dy, x, weight, strides, [0, 0], "images")
    if seen.shape == x.shape:
        return seen
    dx = torch.zeros(x.shape, dtype=dy.dtype, device=x.device).to(memory_format=torch.channels_last)
    dx[:, :, :: strides[0], :: strides[1]] = seen
    return dx


def expect_gradients() -> None:
    """Have the kernels for both gradients of such convolutions built meanwhile."""
    kernels.request("pointwise_gradient", "winograd_weights")
    expect()


@records_one_call
def gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gradients of such a convolution with a stride of 1: dy [N, K, H, W], x [N, C, H, W], weight [K, C, 1, 1] to dx, dw."""
    outputs, channels = weight.shape[:2]
    pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
    many = pixels >= Pointwise.LEAST_PIXELS * torch.get_num_threads()
    if many and outputs * channels <= Pointwise.MOST_WEIGHTS and max(outputs, channels) >= Pointwise.LEAST_OF_WIDER:
        own = kernels.find_operator("pointwise_gradient")
        if own is not None:
            return own(dy, x, weight)
    dx = input_gradient(dy, weight, x, [1, 1])
    if _has_large_weights(pixels, outputs, channels):
        own = products.own_kernel(dy.dtype, "product")
        if own is not None:
            return dx, own(pixels_of(dy).t(), pixels_of(x), None).view(weight.shape)
    own = kernels.find_operator("convolution_weight_gradient") if min(outputs, channels) >= Pointwise.LEAST_OF_NARROWER else None
    if own is not None:
        return dx, own(dy, x, [1, 1], [1, 1], [0, 0])
    return dx, onednn.gradient(dy, x, weight, [1, 1], [0, 0], "kernels")


def _pixel_product(images: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Each pixel of images [N, C, H, W] times kernel' [C, K], plus bias [K], where a product is the fastest way; else None."""
    outputs, inputs = kernel.shape
    count, _, height, width = images.shape
    pixels = count * height * width
    if images.dtype == torch.float32 and _has_fast_pixels(pixels, inputs, outputs):
        own = products.own_kernel(images.dtype, "product")
        if own is not None:
            return own(pixels_of(images), kernel.t(), bias).view(count, height, width, outputs).permute(0, 3, 1, 2)
    multiply = products.onednn_product() if 0 < pixels <= Pointwise.MOST_PIXELS and torch.backends.mkldnn.enabled else None
    if multiply is None:
        return None
    if bias is not None:
        # oneDNN reads one number after another, whatever the strides: of a broadcast bias, what lies behind.
        bias = bias.contiguous()
    return multiply(images.permute(0, 2, 3, 1), kernel, bias, "none", [], "").permute(0, 3, 1, 2)


def _has_fast_pixels(pixels: int, inputs: int, outputs: int) -> bool:
    """Whether the engine's own kernel multiplies the pixels of a convolution the fastest."""
    if torch.cpu._is_avx512_supported() or pixels < Pointwise.FEWEST_PIXELS or outputs < Pointwise.FEWEST_CHANNELS:
        return False
    return pixels <= Pointwise.MOST_PIXELS or outputs >= min(inputs, Pointwise.ENOUGH_CHANNELS)


def _has_large_weights(pixels: int, outputs: int, inputs: int) -> bool:
    """Whether the engine's own kernel for products computes the gradient of such a convolution's weights the fastest."""
    return (
        not torch.cpu._is_avx512_supported() and pixels >= Pointwise.FEWEST_PIXELS and outputs * inputs > Pointwise.MOST_WEIGHTS
    )
