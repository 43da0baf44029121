"""Products of a tall matrix with a weight, and the weight's gradient, by oneDNN where it is the faster library.

Its float32 products of some size beat BLAS on most processors, small ones do not. PyTorch itself takes BLAS for all of them. Both
functions are called as a graph runs, when the sizes are known, and nothing of them is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.overrides import handle_torch_function, has_torch_function

LARGE = 1 << 24
"""Multiplications of a product; below, what oneDNN does before it begins costs more than it gains."""

Product = Callable[..., torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """x W (+ bias): x [..., K] and weight, [N, K] where ``transposed``, [K, N] else, to [..., N]; all of them may be strided."""
    if has_torch_function((x, weight, bias)):  # a graph that is being made: one call in it
        return handle_torch_function(linear, (x, weight, bias), x, weight, bias, transposed)
    columns = weight if transposed else weight.t()
    if x.dim() == 2:
        return _product(x, columns, bias)
    if x.numel() == 0 or weight.numel() == 0:
        empty = torch.matmul(x, columns.t())
        return empty if bias is None else empty + bias
    return _product(x.reshape(-1, x.shape[-1]), columns, bias).view(*x.shape[:-1], columns.shape[0])


def linear_weight_gradient(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left' right: left [M, N] and right [M, K] to [N, K]."""
    if has_torch_function((left, right)):
        return handle_torch_function(linear_weight_gradient, (left, right), left, right)
    # BLAS is as fast as oneDNN where the result is tall, and reads the transposed matrices as they are.
    if left.shape[1] >= right.shape[1]:
        return torch.mm(left.t(), right)
    return _product(left.t(), right.t(), None)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N]."""
    if x.dtype == torch.float32 and x.shape[0] * x.shape[1] * weight.shape[0] > LARGE and torch.backends.mkldnn.enabled:
        large = _pointwise()
        if large is not None:
            return large(x, weight, bias, "none", [], "")
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


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
