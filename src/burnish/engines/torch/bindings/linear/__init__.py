"""Products with a weight, its gradient, and batched products, by the engine's own kernel if it is the fastest.

Large products use the kernel (``products.cpp``), which reads strided operands in place, if the processor has vectors of 256 or
512 bits; all others use PyTorch. The functions are called at run time, when sizes are known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.overrides import handle_torch_function, has_torch_function

from burnish.engines.torch import native as kernels
from burnish.engines.torch.native import Use, declare_kernel
from burnish.engines.torch.runtime.devices import has_narrow_vectors, has_wide_vectors
from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.linear import FUSED_BATCHED_PRODUCT, FUSED_LINEAR, FUSED_LINEAR_GRAD
from burnish.kernels.thresholds import Products, SmallLayers

declare_kernel(
    "products",
    "product(Tensor left, Tensor right, Tensor? bias) -> Tensor",
    "batched_product(Tensor left, Tensor right, int[] order) -> Tensor",
    use=Use.MOST,
)
declare_kernel(
    "linear",
    "linear(Tensor x, Tensor weight, Tensor? bias, bool transposed, bool relu) -> Tensor",
    "linear_gradient(Tensor dy, Tensor x, Tensor? weight, bool transposed, bool swapped, bool relu, bool bias)"
    " -> (Tensor, Tensor, Tensor)",
    use=Use.MOST,
)


Product = Callable[..., torch.Tensor]


def expect(weight: Sequence[Any], dtype: torch.dtype) -> None:
    """Start to build the kernel in the background if products with a weight of these extents will use it."""
    if (
        all(isinstance(extent, int) for extent in weight)
        and math.prod(weight) >= Products.LARGE_WEIGHT
        and suits(dtype, "product")
    ):
        kernels.request("products")


def expect_small() -> None:
    """Start to build the kernel for small layers and their gradients in the background."""
    kernels.request("linear")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool, relu: bool) -> torch.Tensor:
    """Return x W (+ bias), [..., N], for x [..., K] and weight, [N, K] if ``transposed``, else [K, N]; all may be strided.

    With ``relu``, negative elements of the result become 0.
    """
    if has_torch_function((x, weight, bias)):  # while a graph is traced: one call in it
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
    """Return left' right, [N, K], for left [M, N] and right [M, K]."""
    if has_torch_function((left, right)):
        return handle_torch_function(linear_weight_gradient, (left, right), left, right)
    return _product(left.t(), right, None)


def linear_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, transposed: bool, swapped: bool, relu: bool, bias: bool
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a linear layer for dy [..., N] and x [..., K]: of x, of the weight, and of the bias.

    Args:
        dy: gradient of the layer's result.
        x: input of the layer.
        weight: [N, K], or [K, N] if ``transposed``; None if the gradient of x is not needed, which is then empty.
        transposed: see ``weight``.
        swapped: True if the gradient of the weight is x' dy, [K, N], instead of dy' x.
        relu: True if x is the result of a ReLU, and the gradient of the ReLU's input is returned instead of that of x.
        bias: True to compute the gradient of a bias; otherwise it is empty.
    """
    operands = (dy, x, weight)
    if has_torch_function(operands):
        return handle_torch_function(linear_gradients, operands, *operands, transposed, swapped, relu, bias)
    if x.dim() > 2:
        flat = linear_gradients(dy.flatten(0, -2), x.flatten(0, -2), weight, transposed, swapped, relu, bias)
        return flat[0] if weight is None else flat[0].view(x.shape), *flat[1:]
    is_small = dy.dtype == torch.float32 and max(dy.numel(), x.numel()) <= SmallLayers.MOST_ELEMENTS
    if is_small and (together := _small("linear_gradient")) is not None:
        return together(dy, x, weight, transposed, swapped, relu, bias)
    nothing = dy.new_empty(0)
    dx = nothing if weight is None else linear(dy, weight, None, transposed, False)
    if relu and weight is not None:
        dx = torch.ops.aten.threshold_backward.default(dx, x, 0)
    dw = linear_weight_gradient(x, dy) if swapped else linear_weight_gradient(dy, x)
    return dx, dw, dy.sum(0) if bias else nothing


def batched(left: torch.Tensor, right: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return left right, [A, B, M, N], for left [A, B, M, K] and right [A, B, K, N].

    Args:
        left: the left matrices; may be strided.
        right: the right matrices; may be strided.
        order: memory order of the result's axes, outermost first; it does not affect the values.
    """
    if has_torch_function((left, right)):
        return handle_torch_function(batched, (left, right), left, right, order)
    if left.shape[:2] == right.shape[:2] and _is_batch_large(left.shape, right.shape[3]):
        own = own_kernel(left.dtype, "batched_product")
        if own is not None:
            return own(left, right, order)
    return torch.matmul(left, right)


@functools.cache
def onednn_product() -> Product | None:
    """Return oneDNN's x weight' + bias as PyTorch's compiler calls it, or None if this build of PyTorch does not have it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch._C._dispatch_has_kernel_for_dispatch_key("mkldnn::_linear_pointwise", "CPU"):
        return None
    found: Product = operator.default
    return found


def _product(x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None, relu: bool = False) -> torch.Tensor:
    if _is_large(x.shape[0], x.shape[1], columns.shape[1]):
        own = own_kernel(x.dtype, "product")
        if own is not None:
            result = own(x, columns, bias)
            return torch.relu_(result) if relu else result
        if bias is not None and _is_quick_in_onednn(x) and (multiply := onednn_product()) is not None:
            # This adds the bias to the sums, while addmm takes a second pass. oneDNN's ReLU loses NaN.
            result = multiply(x, columns.t(), bias.contiguous(), "none", [], "")
            return torch.relu_(result) if relu else result
    if bias is None:
        result = torch.mm(x, columns)
        return torch.relu_(result) if relu else result
    return torch._addmm_activation(bias, x, columns) if relu else torch.addmm(bias, x, columns)


def _is_quick_in_onednn(x: torch.Tensor) -> bool:
    """True for bfloat16 on a processor with instructions for it, if oneDNN is enabled."""
    narrow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return narrow and bool(torch.backends.mkldnn.enabled)


def _is_large(rows: int, depth: int, columns: int) -> bool:
    if rows * depth * columns <= Products.LARGE:
        return False
    return torch.cpu._is_avx512_supported() or rows * columns >= Products.LEAST_REUSE * (rows + columns)


def _is_batch_large(left: torch.Size, columns: int) -> bool:
    """True if batched products are large enough for the engine's own kernel, and numerous enough for all threads."""
    outer, inner, rows, depth = left
    if (
        min(rows, columns) < Products.NARROWEST
        or outer * rows * depth * columns <= Products.SMALL
        or outer * inner < torch.get_num_threads()
    ):
        return False
    return torch.cpu._is_avx512_supported() or inner > 1


def _is_small(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> bool:
    elements, columns = x.numel(), weight.shape[0 if transposed else 1]
    return (
        elements <= SmallLayers.MOST_ELEMENTS
        and x.shape[0] * columns <= SmallLayers.MOST_ELEMENTS
        and elements * columns <= Products.LARGE
    )


@functools.cache
def _small(name: str) -> Callable[..., Any] | None:
    if not kernels.available("linear"):
        return None
    found: Callable[..., Any] = getattr(torch.ops.burnish, name).default
    return found


@functools.cache
def own_kernel(dtype: torch.dtype, name: str) -> Product | None:
    """Return the engine's kernel if it was measured to win, or None."""
    if not suits(dtype, name) or not kernels.available("products"):
        return None
    found: Product = getattr(torch.ops.burnish, name).default
    return found


def suits(dtype: torch.dtype, name: str) -> bool:
    """True if a function of the kernel was measured to win on this kind of processor.

    With vectors of bfloat16, oneDNN's large products are at least as close to the processor's peak; with tiles, all its products
    are.
    """
    if dtype == torch.float32:
        return has_wide_vectors()
    if dtype != torch.bfloat16 or name == "product":
        return False
    return has_narrow_vectors()


@translates(FUSED_LINEAR)
def fused_linear(op: Call) -> Any:
    expect(op.extents(1), TORCH_DTYPES[op.dtype(0)])
    if op.rank(0) == 2 and op.dtype(0) == ir.DataType.FLOAT:
        expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "relu")]
    return linear(op.tensor(0), op.tensor(1), op.optional(2), *flags)


@translates(FUSED_LINEAR_GRAD)
def fused_linear_gradients(op: Call) -> Any:
    """Translate (dy, x, optional weight) -> dx, dw, db."""
    if op.dtype(0) == ir.DataType.FLOAT:
        expect_small()
    flags = [bool(op.attribute(name)) for name in ("transposed", "swapped", "relu", "bias")]
    results = linear_gradients(op.tensor(0), op.tensor(1), op.optional(2), *flags)
    return tuple(results[index] if op.is_read(index) else None for index in range(3))


@translates(FUSED_BATCHED_PRODUCT)
def batched_product(op: Call) -> Any:
    return batched(op.tensor(0), op.tensor(1), list(op.attribute("perm")))
