"""Products with a weight, the weight's gradient, and products of batches, by the engine's own kernel where it is the fastest.

Large products are the kernel's (``products.cpp``), which reads strided operands as they lie, where the processor has
vectors of 256 or 512 bits; all others are PyTorch's. The functions are called as a graph runs, when the sizes are known.

Convolutions of one pixel are products, too: where there are few pixels, products of matrices beat oneDNN's convolutions, which
reorder their kernels each time; the kernel's do so with many pixels and enough channels of the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from burnish.engines.torch.native import kernels, schemas
from burnish.engines.torch.runtime.processor import has_narrow_vectors, has_wide_vectors

LARGE = 1 << 24
"""Multiplications of a product; below, packing of the operands costs more than the kernel gains."""

LEAST_REUSE = 56
"""Multiplications for each element of the operands from which on the kernel was measured to win with vectors of 256 bits; with
those of 512 bits it did with fewer."""

NARROWEST = 16
SMALL = 1 << 16
"""Extent of a result's matrices, and multiplications of a batch for one of its inner axis; below, PyTorch's products do, and with
vectors of 256 bits where there is one of that axis: matrices that lie side by side."""

LARGE_WEIGHT = 1 << 18
"""Elements of a weight whose products are expected to be large."""

SMALL_ROWS = 1 << 16
"""Elements of a layer's results, and of what it was given, up to which it is computed in one call, and its gradients in another:
what is beside the products runs on one thread."""

MOST_PIXELS = 4096
"""Results of a convolution up to which a product was measured to be as fast or faster: by up to 1.9 times with the fewest."""

FEWEST_PIXELS = 96
FEWEST_CHANNELS = 32
ENOUGH_CHANNELS = 512
"""Results, and channels of them, from which on the kernel's product was measured to be the fastest with vectors of 256 bits; of
more pixels than ``MOST_PIXELS`` it is where there are no fewer channels of the results than of what they are of, or enough."""

MOST_WEIGHTS = 1 << 17
LEAST_OF_WIDER = 64
LEAST_PIXELS = 96
"""Weights of a convolution up to which both its gradients were measured to be faster together, by 1.0 to 1.8 times: all sums are
gone through with every block of pixels. Channels of its wider side, and pixels for each thread, from which on they were."""

LEAST_OF_NARROWER = 64
"""Channels of its narrower side from which on the gradient of the weights alone is faster as a product than oneDNN's."""

Product = Callable[..., torch.Tensor]


def expect(weight: Sequence[Any], dtype: torch.dtype) -> None:
    """Have the kernel built meanwhile, where products with a weight of these extents will ask for it."""
    if all(isinstance(extent, int) for extent in weight) and math.prod(weight) >= LARGE_WEIGHT and _suits(dtype, "product"):
        kernels.request("products")


def expect_pointwise() -> None:
    """Have the kernel built meanwhile, where convolutions of one pixel will ask for it."""
    if _suits(torch.float32, "product") and not torch.cpu._is_avx512_supported():
        kernels.request("products")


def expect_small() -> None:
    """Have the kernel for small layers and their gradients built meanwhile."""
    kernels.request("linear")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, relu: bool) -> torch.Tensor:
    """x W (+ bias): x [..., K] and weight, [N, K] where ``transposed``, [K, N] else, to [..., N]; all of them may be strided.

    Where ``relu``, its negative elements are 0 in the result.
    """
    if has_torch_function((x, weight, bias)):  # a graph that is being made: one call in it
        return handle_torch_function(linear, (x, weight, bias), x, weight, bias, transposed, relu)
    if x.dim() == 2 and x.dtype == torch.float32 and _is_small(x, weight, transposed) and (own := _small("linear")) is not None:
        return own(x, weight, bias, transposed, relu)
    columns = weight.t() if transposed else weight
    if x.dim() == 2:
        return _product(x, columns, bias, relu)
    if x.numel() == 0 or weight.numel() == 0:
        empty = torch.matmul(x, columns)
        result = empty if bias is None else empty + bias
        return torch.relu(result) if relu else result
    return _product(x.reshape(-1, x.shape[-1]), columns, bias, relu).view(*x.shape[:-1], columns.shape[1])


def linear_weight_gradient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left' right: left [M, N] and right [M, K] to [N, K]."""
    if has_torch_function((left, right)):
        return handle_torch_function(linear_weight_gradient, (left, right), left, right)
    return _product(left.t(), right, None)


def linear_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, transposed: bool, swapped: bool, relu: bool, bias: bool
) -> tuple[torch.Tensor, ...]:
    """The gradients of a linear layer of float32, from dy [M, N] and x [M, K]: of x, of the weight, and of the bias.

    Args:
        dy: the gradient of the layer's result.
        x: what the layer was given.
        weight: [N, K], or [K, N] where ``transposed``; None where the gradient of x is not wanted, whose place is then empty.
        transposed: see ``weight``.
        swapped: whether the gradient of the weight is x' dy, [K, N], in place of dy' x.
        relu: whether x is the result of a ReLU, and the gradient of what that was given is wanted in place of that of x.
        bias: whether the gradient of a bias is wanted; its place is empty otherwise.
    """
    operands = (dy, x, weight)
    if has_torch_function(operands):
        return handle_torch_function(linear_gradients, operands, *operands, transposed, swapped, relu, bias)
    if dy.numel() <= SMALL_ROWS and x.numel() <= SMALL_ROWS and (together := _small("linear_gradient")) is not None:
        return together(dy, x, weight, transposed, swapped, relu, bias)
    nothing = dy.new_empty(0)
    dx = nothing if weight is None else linear(dy, weight, None, transposed, False)
    if relu and weight is not None:
        dx = torch.ops.aten.threshold_backward.default(dx, x, 0)
    dw = linear_weight_gradient(x, dy) if swapped else linear_weight_gradient(dy, x)
    return dx, dw, dy.sum(0) if bias else nothing


def batched(left: torch.Tensor, right: torch.Tensor, order: list[int]) -> torch.Tensor:
    """left right: left [A, B, M, K] and right [A, B, K, N] to [A, B, M, N].

    Args:
        left: the left matrices; they may be strided.
        right: the right ones, too.
        order: how the result's axes should lie in memory, outermost first; values do not depend on it.
    """
    if has_torch_function((left, right)):
        return handle_torch_function(batched, (left, right), left, right, order)
    if left.shape[:2] == right.shape[:2] and _is_batch_large(left.shape, right.shape[3]):
        own = _own(left.dtype, "batched_product")
        if own is not None:
            return own(left, right, order)
    return torch.matmul(left, right)


def pointwise_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, strides: Sequence[int]
) -> torch.Tensor:
    """The convolution of images [N, C, H, W] with kernels [K, C, 1, 1], without padding."""
    if has_torch_function((x, weight, bias)):
        return handle_torch_function(pointwise_convolution, (x, weight, bias), x, weight, bias, strides)
    seen = x[:, :, :: strides[0], :: strides[1]]
    result = _pixel_product(seen, weight.flatten(1), bias)
    return functional.conv2d(x, weight, bias, list(strides)) if result is None else result


def pointwise_input_gradient(dy: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The gradient of the images of such a convolution, from that of its results; of x the shape is read."""
    if has_torch_function((dy, weight, x)):
        return handle_torch_function(pointwise_input_gradient, (dy, weight, x), dy, weight, x, strides)
    seen = _pixel_product(dy, weight.flatten(1).t(), None)
    if seen is None:
        ones, zeros, wanted = [1, 1], [0, 0], [True, False, False]
        if x.dtype != dy.dtype:
            x = torch.empty_like(x, dtype=dy.dtype)
        return torch.ops.aten.convolution_backward.default(dy, x, weight, None, strides, zeros, ones, False, zeros, 1, wanted)[0]
    if seen.shape == x.shape:
        return seen
    dx = torch.zeros(x.shape, dtype=dy.dtype, device=x.device).to(memory_format=torch.channels_last)
    dx[:, :, :: strides[0], :: strides[1]] = seen
    return dx


def expect_pointwise_gradients() -> None:
    """Have the kernels for both gradients of such convolutions built meanwhile."""
    kernels.request("pointwise_gradient", "winograd_weights")
    expect_pointwise()


def pointwise_gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gradients of such a convolution with a stride of 1: dy [N, K, H, W], x [N, C, H, W], weight [K, C, 1, 1] to dx, dw."""
    if has_torch_function((dy, x, weight)):
        return handle_torch_function(pointwise_gradients, (dy, x, weight), dy, x, weight)
    outputs, channels = weight.shape[:2]
    pixels = dy.shape[0] * dy.shape[2] * dy.shape[3]
    many = pixels >= LEAST_PIXELS * torch.get_num_threads()
    if many and outputs * channels <= MOST_WEIGHTS and max(outputs, channels) >= LEAST_OF_WIDER:
        own = _of_convolutions("pointwise_gradient")
        if own is not None:
            return own(dy, x, weight)
    dx = pointwise_input_gradient(dy, weight, x, [1, 1])
    if _has_large_weights(pixels, outputs, channels):
        own = _own(dy.dtype, "product")
        if own is not None:
            return dx, own(_pixels_of(dy).t(), _pixels_of(x), None).view(weight.shape)
    own = _of_convolutions("convolution_weight_gradient") if min(outputs, channels) >= LEAST_OF_NARROWER else None
    if own is not None:
        return dx, own(dy, x, [1, 1], [1, 1], [0, 0])
    ones, zeros, wanted = [1, 1], [0, 0], [False, True, False]
    return dx, torch.ops.aten.convolution_backward.default(dy, x, weight, None, ones, zeros, ones, False, zeros, 1, wanted)[1]


@functools.cache
def _of_convolutions(name: str) -> Callable[..., Any] | None:
    """The engine's kernel for gradients of convolutions, or None where it is not there."""
    if not kernels.available(schemas.KERNEL_OF[name]):
        return None
    found: Callable[..., Any] = getattr(torch.ops.burnish, name).default
    return found


def _pixel_product(images: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Each pixel of images [N, C, H, W] times kernel' [C, K], plus bias [K], where a product is the fastest way; else None."""
    outputs, inputs = kernel.shape
    count, _, height, width = images.shape
    pixels = count * height * width
    if images.dtype == torch.float32 and _has_fast_pixels(pixels, inputs, outputs):
        own = _own(images.dtype, "product")
        if own is not None:
            return own(_pixels_of(images), kernel.t(), bias).view(count, height, width, outputs).permute(0, 3, 1, 2)
    multiply = _pointwise() if 0 < pixels <= MOST_PIXELS and torch.backends.mkldnn.enabled else None
    if multiply is None:
        return None
    if bias is not None:
        # oneDNN reads one number after another, whatever the strides: of a broadcast bias, what lies behind.
        bias = bias.contiguous()
    return multiply(images.permute(0, 2, 3, 1), kernel, bias, "none", [], "").permute(0, 3, 1, 2)


def _has_fast_pixels(pixels: int, inputs: int, outputs: int) -> bool:
    """Whether the engine's own kernel multiplies the pixels of a convolution the fastest."""
    if torch.cpu._is_avx512_supported() or pixels < FEWEST_PIXELS or outputs < FEWEST_CHANNELS:
        return False
    return pixels <= MOST_PIXELS or outputs >= min(inputs, ENOUGH_CHANNELS)


def _has_large_weights(pixels: int, outputs: int, inputs: int) -> bool:
    """Whether the engine's own kernel for products computes the gradient of such a convolution's weights the fastest."""
    return not torch.cpu._is_avx512_supported() and pixels >= FEWEST_PIXELS and outputs * inputs > MOST_WEIGHTS


def _pixels_of(images: torch.Tensor) -> torch.Tensor:
    """Images [N, C, H, W] as a matrix [N * H * W, C]."""
    return images.permute(0, 2, 3, 1).reshape(-1, images.shape[1])


@functools.cache
def _pointwise() -> Product | None:
    """oneDNN's x weight' + bias as PyTorch's compiler calls it, or None where this build of PyTorch is without it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key("mkldnn::_linear_pointwise", "CPU"):
        return None
    found: Product = operator.default
    return found


def _product(x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None, relu: bool = False) -> torch.Tensor:
    """x [M, K] times columns [K, N], plus bias [N], and its ReLU where ``relu``."""
    if _is_large(x.shape[0], x.shape[1], columns.shape[1]):
        own = _own(x.dtype, "product")
        if own is not None:
            result = own(x, columns, bias)
            return torch.relu_(result) if relu else result
        if bias is not None and _is_quick_in_onednn(x) and (multiply := _pointwise()) is not None:
            # The bias is added to the sums, where addmm goes over the result again. oneDNN's ReLU lets no NaN through.
            result = multiply(x, columns.t(), bias.contiguous(), "none", [], "")
            return torch.relu_(result) if relu else result
    if bias is None:
        result = torch.mm(x, columns)
        return torch.relu_(result) if relu else result
    return torch._addmm_activation(bias, x, columns) if relu else torch.addmm(bias, x, columns)


def _is_quick_in_onednn(x: torch.Tensor) -> bool:
    """Whether a matrix is of bfloat16, on a processor with instructions for it, and oneDNN is switched on."""
    narrow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return narrow and bool(torch.backends.mkldnn.enabled)


def _is_large(rows: int, depth: int, columns: int) -> bool:
    """Whether a product is large enough for the engine's own kernel."""
    if rows * depth * columns <= LARGE:
        return False
    return torch.cpu._is_avx512_supported() or rows * columns >= LEAST_REUSE * (rows + columns)


def _is_batch_large(left: torch.Size, columns: int) -> bool:
    """Whether the products of a batch are large enough for the engine's own kernel, and enough of them for all threads."""
    outer, inner, rows, depth = left
    if min(rows, columns) < NARROWEST or outer * rows * depth * columns <= SMALL or outer * inner < torch.get_num_threads():
        return False
    return torch.cpu._is_avx512_supported() or inner > 1


def _is_small(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> bool:
    """Whether a layer has few rows, and its product is none for the engine's own kernel."""
    elements, columns = x.numel(), weight.shape[0 if transposed else 1]
    return elements <= SMALL_ROWS and x.shape[0] * columns <= SMALL_ROWS and elements * columns <= LARGE


@functools.cache
def _small(name: str) -> Callable[..., Any] | None:
    """The engine's kernel for small layers, or for their gradients, or None where it is not there."""
    if not kernels.available("linear"):
        return None
    found: Callable[..., Any] = getattr(torch.ops.burnish, name).default
    return found


@functools.cache
def _own(dtype: torch.dtype, name: str) -> Product | None:
    """The engine's kernel where it was measured to win, or None."""
    if not _suits(dtype, name) or not kernels.available("products"):
        return None
    found: Product = getattr(torch.ops.burnish, name).default
    return found


def _suits(dtype: torch.dtype, name: str) -> bool:
    """Whether the processor is of the kind that one of the kernel's functions was measured to win on.

    With vectors of bfloat16 oneDNN's large products are as near to what the processor can do, or nearer; with tiles all are.
    """
    if dtype == torch.float32:
        return has_wide_vectors()
    if dtype != torch.bfloat16 or name == "product":
        return False
    return has_narrow_vectors()
