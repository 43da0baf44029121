"""Convolutions and their gradients, by kernels of the engine or by PyTorch's fastest way."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch
from torch.nn import functional

from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.calls import calls_kernel
from burnish.engines.torch.bindings.convolution import algorithms, products
from burnish.engines.torch.native import Use, declare_kernel
from burnish.engines.torch.runtime.devices import has_narrow_vectors
from burnish.engines.torch.translate.rules import Call, explicit_pads, translates
from burnish.kernels.convolution import (
    CHOSEN_CONV,
    CHOSEN_CONV_INPUT_GRAD,
    CHOSEN_CONV_TRANSPOSE,
    CHOSEN_CONV_WEIGHT_GRAD,
    CONV_INPUT_GRAD_NARROW,
    CONV_WEIGHT_GRAD_NARROW,
    CONV_WEIGHT_GRAD_PRODUCTS,
    DEPTHWISE_CONV,
    DEPTHWISE_CONV_GRAD,
    POINTWISE_CONV,
    POINTWISE_CONV_GRAD,
    POINTWISE_CONV_INPUT_GRAD,
    WINOGRAD_CONV,
    WINOGRAD_CONV_INPUT_GRAD,
    WINOGRAD_CONV_WEIGHT_GRAD,
)
from burnish.kernels.thresholds import NarrowConvolutions
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

_DEPTHWISE = (
    "depthwise_convolution{}(Tensor x, Tensor weight, Tensor? bias, int stride, int[] pads) -> Tensor",
    "depthwise_convolution_gradient{}(Tensor dy, Tensor x, Tensor weight, int stride, int[] pads, bool input, bool weight_too)"
    " -> (Tensor, Tensor)",
)

declare_kernel(
    "winograd",
    "winograd_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding) -> Tensor",
    "winograd_input_gradient(Tensor dy, Tensor weight, int[] padding) -> Tensor",
    use=Use.SOME,
)
declare_kernel(
    "winograd_weights",
    "winograd_weight_gradient(Tensor dy, Tensor x, int[] padding) -> Tensor",
    "convolution_weight_gradient(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
    use=Use.SOME,
)
declare_kernel(
    "pointwise_gradient",
    "pointwise_gradient(Tensor dy, Tensor x, Tensor weight) -> (Tensor, Tensor)",
    use=Use.SOME,
)
declare_kernel("depthwise", *_DEPTHWISE, use=Use.SOME)
declare_kernel(
    "convolution_weights_bfloat16",
    "convolution_weight_gradient_bfloat16(Tensor dy, Tensor x, int[] extents, int[] strides, int[] padding) -> Tensor",
)
declare_kernel("depthwise_5x5", *_DEPTHWISE, suffix="_5x5")
declare_kernel("depthwise_bfloat16", *_DEPTHWISE, suffix="_bfloat16")
declare_kernel("depthwise_5x5_bfloat16", *_DEPTHWISE, suffix="_5x5_bfloat16")


FEW_CHANNELS = 16
"""The number of channels that fills two vectors of AVX2: with fewer, oneDNN's strided 1x1 convolutions are not used."""


def _window(op: Call, weight: int) -> tuple[list[Any], list[int], list[int], list[int], int]:
    """Return kernel extents, strides, dilations, pads (begins, then ends) and group of a convolution."""
    kernel = op.attribute("kernel_shape")
    if kernel is None:
        kernel = op.extents(weight)[2:]
    rank = len(kernel)
    return (
        list(kernel),
        list(op.attribute("strides", [1] * rank)),
        list(op.attribute("dilations", [1] * rank)),
        list(op.attribute("pads", [0] * (2 * rank))),
        op.attribute("group", 1),
    )


def _padded_evenly(x: Any, pads: list[Any]) -> tuple[Any, list[Any]]:
    """Return the input and the symmetric padding for PyTorch; asymmetric padding is applied to the input."""
    rank = len(pads) // 2
    begins, ends = pads[:rank], pads[rank:]
    if begins == ends:
        return x, begins
    amounts = [amount for axis in reversed(range(rank)) for amount in (begins[axis], ends[axis])]
    return functional.pad(x, amounts), [0] * rank


def _is_product(op: Call, images: int, weight: int, largest: int) -> bool:
    """True if a 1x1 convolution in bfloat16 on a CPU is faster as one matrix product.

    oneDNN reorders the weights of a convolution before and after it, which takes long for small maps with many channels.
    """
    if op.device.type != "cpu" or op.dtype() != ir.DataType.BFLOAT16:
        return False
    extents, kernel = op.extents(images), op.extents(weight)
    if len(extents) != 4 or kernel[2:] != [1, 1] or not all(isinstance(extent, int) for extent in extents[2:]):
        return False
    _, strides, _, pads, group = _window(op, weight)
    automatic = op.attribute("auto_pad", "NOTSET") == "NOTSET"
    return strides == [1, 1] and not any(pads) and group == 1 and automatic and math.prod(extents[2:]) <= largest


def _skips_pixels_of_few_channels(op: Call, weight: int) -> bool:
    """True for a strided 1x1 convolution with few input channels.

    On processors with AVX2 but no AVX-512, oneDNN computes its weight gradient with whole vectors, which it writes beyond the end
    of the result.
    """
    extents = op.extents(weight)
    kernel, strides, _, pads, group = _window(op, weight)
    automatic = op.attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    few = isinstance(extents[1], int) and extents[1] < FEW_CHANNELS
    return (
        few and op.device.type == "cpu" and max(kernel) == 1 and max(strides) > 1 and not any(pads) and group == 1 and automatic
    )


def _channels_last(images: Any) -> Any:
    """Return [N, C, H, W] as [N, H, W, C]: without a copy if the channels are last in memory."""
    return torch.permute(images, [0, 2, 3, 1])


def _channels_second(images: Any) -> Any:
    return torch.permute(images, [0, 3, 1, 2])


@translates("Conv")
def convolution(op: Call) -> Any:
    if not op.has(2) and _is_product(op, 0, 1, NarrowConvolutions.LARGEST_MAP):
        return _channels_second(torch.matmul(_channels_last(op.tensor(0)), torch.flatten(op.tensor(1), 1).t()))
    kernel, strides, dilations, pads, group = _window(op, 1)
    x, padding = _padded_evenly(op.tensor(0), explicit_pads(op, kernel, strides, dilations, pads))
    function: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(kernel)]
    return function(x, op.tensor(1), op.optional(2), strides, padding, dilations, group)


@translates("ConvInteger")
def convolution_of_integers(op: Call) -> Any:
    """Computed in float64, which holds every sum exactly. Padding equals the zero point, which is zero after subtraction."""
    x, weight = op.tensor(0).to(torch.float64), op.tensor(1).to(torch.float64)
    kernel, strides, dilations, pads, group = _window(op, 1)
    if op.has(2):
        x = x - op.tensor(2).to(torch.float64)
    if op.has(3):
        zero_point = op.tensor(3).to(torch.float64)
        weight = weight - (torch.reshape(zero_point, [-1, *[1] * (len(kernel) + 1)]) if op.rank(3) else zero_point)
    x, padding = _padded_evenly(x, explicit_pads(op, kernel, strides, dilations, pads))
    function: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(kernel)]
    return function(x, weight, None, strides, padding, dilations, group).to(torch.int32)


@translates(CHOSEN_CONV)
def chosen_convolution(op: Call) -> Any:
    kernel, strides, dilations, pads, group = _window(op, 1)
    x, padding = _padded_evenly(op.tensor(0), explicit_pads(op, kernel, strides, dilations, pads))
    measured = bool(op.attribute("measured"))
    return algorithms.convolve(x, op.tensor(1), op.optional(2), strides, padding, dilations, group, measured)


@translates("ConvTranspose", CHOSEN_CONV_TRANSPOSE)
def transposed_convolution(op: Call) -> Any:
    kernel, strides, dilations, pads, group = _window(op, 1)
    rank = len(kernel)
    extra = list(op.attribute("output_padding", [0] * rank))
    wanted = op.attribute("output_shape")
    automatic = op.attribute("auto_pad", "NOTSET")
    begins, ends = pads[:rank], pads[rank:]
    if automatic == "VALID" and wanted is None:
        begins = ends = [0] * rank
    elif wanted is not None or automatic in ("SAME_UPPER", "SAME_LOWER"):
        for axis in range(rank):
            natural = (kernel[axis] - 1) * dilations[axis] + 1 + extra[axis]
            if wanted is None:
                total = natural - strides[axis]
            else:
                extent = op.known_extents()[axis + 2]
                total = (extent - 1) * strides[axis] + natural - wanted[axis - rank]
            extra[axis] += max(-total, 0)
            total = max(total, 0)
            smaller = total // 2
            begins[axis] = smaller if automatic == "SAME_UPPER" else total - smaller
            ends[axis] = total - begins[axis]
    # PyTorch pads both sides equally and extends the end: compute without pads, and crop.
    if begins == ends and all(
        more < max(stride, dilation) for more, stride, dilation in zip(extra, strides, dilations, strict=True)
    ):
        return _transposed(op, op.optional(2), begins, extra, strides, dilations, group)
    y = _transposed(op, None, [0] * rank, [0] * rank, strides, dilations, group)
    amounts = [amount for axis in reversed(range(rank)) for amount in (-begins[axis], extra[axis] - ends[axis])]
    y = functional.pad(y, amounts)
    return y + torch.reshape(op.tensor(2), [-1, *[1] * rank]) if op.has(2) else y


def _transposed(
    op: Call, bias: Any, padding: list[int], extra: list[int], strides: list[int], dilations: list[int], group: int
) -> Any:
    if CHOSEN_CONV_TRANSPOSE.is_of(op.node):
        return algorithms.transposed(
            op.tensor(0), op.tensor(1), bias, strides, padding, extra, dilations, group, bool(op.attribute("measured"))
        )
    rank = len(strides)
    function = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}[rank]
    return function(op.tensor(0), op.tensor(1), bias, strides, padding, extra, group, dilations)


@translates(CONV_INPUT_GRAD)
def convolution_input_gradient(op: Call) -> Any:
    """Translate (dy, w, x) -> dx; only the shape of x is read."""
    if _is_product(op, 2, 1, NarrowConvolutions.LARGEST_MAP):
        return _channels_second(torch.matmul(_channels_last(op.tensor(0)), torch.flatten(op.tensor(1), 1)))
    return _backward(op, op.tensor(0), op.tensor(2), op.tensor(1), weight_index=1, wanted=0)


@translates(CONV_WEIGHT_GRAD)
def convolution_weight_gradient(op: Call) -> Any:
    """Translate (dy, x, w) -> dw; only the shape of w is read."""
    if _is_product(op, 1, 2, NarrowConvolutions.LARGEST_MAP_OF_GRADIENT):
        dy, x = (torch.flatten(_channels_last(op.tensor(index)), 0, 2) for index in (0, 1))
        return torch.mm(dy.t(), x)[:, :, None, None]
    if _skips_pixels_of_few_channels(op, 2):
        strides = _window(op, 2)[1]
        seen = op.tensor(1)[(slice(None), slice(None), *(slice(None, None, step) for step in strides))]
        dy, x = (torch.flatten(torch.movedim(images, 1, -1), 0, -2) for images in (op.tensor(0), seen))
        return torch.reshape(torch.mm(dy.t(), x), [*op.extents(2)[:2], *[1] * len(strides)])
    return _backward(op, op.tensor(0), op.tensor(1), op.tensor(2), weight_index=2, wanted=1)


@translates(CHOSEN_CONV_INPUT_GRAD)
def chosen_input_gradient(op: Call) -> Any:
    """Translate (dy, w, x) -> dx; only the shape of x is read."""
    _, strides, dilations, pads, group = _window(op, 1)
    x = op.tensor(2)
    padded, padding = _padded_evenly(x, pads)
    window = strides, padding, dilations, group, bool(op.attribute("measured"))
    dx = algorithms.input_gradient(op.tensor(0), op.tensor(1), padded, *window)
    return dx if padded is x else _without_pads(dx, pads)


@translates(CHOSEN_CONV_WEIGHT_GRAD)
def chosen_weight_gradient(op: Call) -> Any:
    """Translate (dy, x, w) -> dw; only the shape of w is read."""
    _, strides, dilations, pads, group = _window(op, 2)
    x, padding = _padded_evenly(op.tensor(1), pads)
    window = strides, padding, dilations, group, bool(op.attribute("measured"))
    return algorithms.weight_gradient(op.tensor(0), x, op.tensor(2), *window)


@translates(CONV_INPUT_GRAD_NARROW)
def narrow_input_gradient(op: Call) -> Any:
    """Translate (dy, w, x) -> dx; only the shape of x is read."""
    if not has_narrow_vectors():
        return convolution_input_gradient(op)
    return products.strided_input_gradient(op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("strides"))


@translates(CONV_WEIGHT_GRAD_NARROW)
def narrow_weight_gradient(op: Call) -> Any:
    """Translate (dy, x, w) -> dw; only the shape of w is read."""
    if not has_narrow_vectors():
        return convolution_weight_gradient(op)
    products.expect_weight_gradient()
    dy, x, weight = op.tensors()
    return products.weight_gradient(dy, x, weight, op.attribute("strides"), op.attribute("pads")[:2])


def _backward(op: Call, dy: Any, x: Any, weight: Any, weight_index: int, wanted: int) -> Any:
    _, strides, dilations, pads, group = _window(op, weight_index)
    rank = len(strides)
    padded, padding = _padded_evenly(x, pads)
    is_padded = padded is not x
    mask = [wanted == 0, wanted == 1, False]
    if op.dtype(2) != op.dtype(0):  # only the shape of the third operand is read
        if wanted == 0:
            padded = torch.empty_like(padded, dtype=op.torch_dtype(0))
        else:
            weight = torch.empty_like(weight, dtype=op.torch_dtype(0))
    gradients = torch.ops.aten.convolution_backward.default(
        dy, padded, weight, None, strides, padding, dilations, False, [0] * rank, group, mask
    )
    gradient = gradients[wanted]
    return _without_pads(gradient, pads) if wanted == 0 and is_padded else gradient


def _without_pads(images: Any, pads: list[Any]) -> Any:
    rank = len(pads) // 2
    return functional.pad(images, [-amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])])


def _window_suffix(op: Call, weight: int) -> str:
    """Return the name suffix of the kernels for windows of 5x5; those for 3x3 have none."""
    return "_5x5" if op.known_extents(weight)[2] == 5 else ""


@translates(DEPTHWISE_CONV)
def depthwise_convolution(op: Call) -> Any:
    return kernels.for_elements("depthwise_convolution" + _window_suffix(op, 1), op.dtype(0))(
        op.tensor(0), op.tensor(1), op.optional(2), op.attribute("stride"), list(op.attribute("pads"))
    )


@translates(DEPTHWISE_CONV_GRAD)
def depthwise_convolution_gradient(op: Call) -> Any:
    wanted = [bool(op.attribute(name)) for name in ("input", "weight")]
    results = kernels.for_elements("depthwise_convolution_gradient" + _window_suffix(op, 2), op.dtype(0))(
        op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("stride"), list(op.attribute("pads")), *wanted
    )
    return results[0], results[1]


calls_kernel(WINOGRAD_CONV, "winograd_convolution")
calls_kernel(WINOGRAD_CONV_INPUT_GRAD, "winograd_input_gradient")
calls_kernel(WINOGRAD_CONV_WEIGHT_GRAD, "winograd_weight_gradient")
calls_kernel(CONV_WEIGHT_GRAD_PRODUCTS, "convolution_weight_gradient")


@translates(POINTWISE_CONV)
def pointwise_convolution(op: Call) -> Any:
    products.expect()
    return products.convolution(op.tensor(0), op.tensor(1), op.optional(2), op.attribute("strides"))


@translates(POINTWISE_CONV_INPUT_GRAD)
def pointwise_input_gradient(op: Call) -> Any:
    """Translate (dy, w, x) -> dx; only the shape of x is read."""
    products.expect()
    return products.input_gradient(op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("strides"))


@translates(POINTWISE_CONV_GRAD)
def pointwise_gradients(op: Call) -> Any:
    """Translate (dy, x, w) -> dx, dw."""
    products.expect_gradients()
    results = products.gradients(*op.tensors())
    return results[0], results[1]
