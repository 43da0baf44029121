"""Decompositions of operators over complex numbers into operators over real and imaginary parts.

The exporter holds a complex tensor as pairs, and has translations of a few operators over those alone. These are for programs
with complex numbers. Each returns ``NotImplemented`` for real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten

REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _real(value: Any) -> Any:
    return value.real if _is_complex(value) else value


def _imaginary(value: Any) -> Any:
    if _is_complex(value):
        return value.imag
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.zeros_like(value)
    return 0.0 if isinstance(value, float) else value


def _by_parts(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that moves numbers, or adds them, and does the same with both parts."""

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_complex, pytree.tree_leaves((args, kwargs)))):
            return NotImplemented
        real, imaginary = (
            operator(*pytree.tree_map(part, args), **pytree.tree_map(part, kwargs)) for part in (_real, _imaginary)
        )
        return pytree.tree_map(torch.complex, real, imaginary)

    return decomposition


def _pad(x: Any, pad: Sequence[int], value: float = 0) -> Any:
    return _by_parts(aten.constant_pad_nd.default)(x, pad, float(value) if not isinstance(value, complex) else value)


def _parts(value: Any) -> tuple[Any, Any]:
    """Real and imaginary part; the latter is None of what is real."""
    return (value.real, value.imag) if _is_complex(value) else (value, None)


def _product(multiply: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def decomposition(x: Any, y: Any) -> Any:
        (a, b), (c, d) = _parts(x), _parts(y)
        if b is None and d is None:
            return NotImplemented
        if d is None:
            return torch.complex(multiply(a, c), multiply(b, c))
        if b is None:
            return torch.complex(multiply(a, c), multiply(a, d))
        return torch.complex(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))

    return decomposition


_multiply = _product(lambda x, y: x * y)
_multiply_matrices = _product(torch.matmul)


def _divide(x: Any, y: Any) -> Any:
    if not _is_complex(y):
        return _multiply(x, 1 / y)
    c, d = _parts(y)
    size = c * c + d * d
    return _multiply(x, torch.complex(c / size, -d / size) if isinstance(size, torch.Tensor) else 1 / y)


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    (a, b), (c, d) = _parts(x), _parts(y)
    if b is None and d is None:
        return NotImplemented
    real = a + alpha * c
    imaginary = b if d is None else alpha * d if b is None else b + alpha * d
    return torch.complex(real, torch.zeros_like(real) + imaginary)


def _subtract(x: Any, y: Any, alpha: Any = 1) -> Any:
    return _add(x, y, -alpha)


def _add_product(x: Any, y: Any, z: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not any(map(_is_complex, (x, y, z))):
        return NotImplemented
    product = _multiply_matrices(y, z)
    return (torch.matmul(y, z) if product is NotImplemented else product) * alpha + x * beta


def _size(x: Any) -> Any:
    """``abs``, whose gradient is 0 at 0."""
    return torch.linalg.vector_norm(torch.view_as_real(x), 2, -1) if _is_complex(x) else NotImplemented


def _norm(x: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.linalg.vector_norm(_size(x), *args, **kwargs) if _is_complex(x) else NotImplemented


def _sign(x: Any) -> Any:
    if not _is_complex(x):
        return NotImplemented
    size = _size(x)
    return x / torch.where(size == 0, torch.ones_like(size), size)


def _of_angle(size: Any, angle: Any) -> Any:
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


def _exponential(x: Any) -> Any:
    return _of_angle(torch.exp(x.real), x.imag) if _is_complex(x) else NotImplemented


def _logarithm(x: Any) -> Any:
    return torch.complex(torch.log(_size(x)), torch.atan2(x.imag, x.real)) if _is_complex(x) else NotImplemented


def _root(x: Any) -> Any:
    return _power(x, 0.5)


def _power(x: Any, exponent: Any) -> Any:
    if not _is_complex(x) or isinstance(exponent, complex):
        return NotImplemented
    if exponent == int(exponent) and 0 < exponent <= 8:
        result = x
        for _ in range(int(exponent) - 1):
            result = result * x
        return result
    return _of_angle(_size(x) ** exponent, torch.atan2(x.imag, x.real) * exponent)


def _cast(x: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    if dtype not in REAL:
        return NotImplemented if dtype is None or not _is_complex(x) else x.real.to(dtype)
    real = x.real.to(REAL[dtype])
    return torch.complex(real, x.imag.to(REAL[dtype]) if _is_complex(x) else torch.zeros_like(real))


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **where: Any) -> Any:
    dtype = (torch.complex64 if isinstance(value, complex) else None) if dtype is None else dtype
    if dtype not in REAL:
        return NotImplemented
    value = complex(value)
    return torch.complex(torch.full(size, value.real, dtype=REAL[dtype]), torch.full(size, value.imag, dtype=REAL[dtype]))


def _full_of(value: float) -> Callable[..., Any]:
    return lambda size, *, dtype=None, **where: _full(size, value, dtype=dtype)


def _full_like(x: Any, value: Any, *, dtype: torch.dtype | None = None, **where: Any) -> Any:
    return _full(x.shape, value, dtype=x.dtype if dtype is None else dtype)


def _like_of(value: float) -> Callable[..., Any]:
    return lambda x, *, dtype=None, **where: _full_like(x, value, dtype=dtype)


def _new_of(value: float) -> Callable[..., Any]:
    return lambda x, size, *, dtype=None, **where: _full(size, value, dtype=x.dtype if dtype is None else dtype)


COMPLEX: dict[Any, Callable[..., Any]] = {
    **{
        operator: _by_parts(operator)
        for operator in (
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.select.int,
            aten.slice.Tensor,
            aten.expand.default,
            aten.index.Tensor,
            aten.index_select.default,
            aten.index_put.default,
            aten.slice_scatter.default,
            aten.select_scatter.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
            aten.repeat.default,
            aten.gather.default,
            aten.copy.default,
            aten.cumsum.default,
            aten.where.self,
            aten.masked_fill.Scalar,
            aten.tril.default,
            aten.triu.default,
            aten.diagonal.default,
            aten.cat.default,
            aten.flip.default,
            aten.mean.dim,
            aten.sum.dim_IntList,
        )
    },
    aten.constant_pad_nd.default: _pad,
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _subtract,
    aten.sub.Scalar: _subtract,
    aten.mm.default: _multiply_matrices,
    aten.bmm.default: _multiply_matrices,
    aten.addmm.default: _add_product,
    aten.abs.default: _size,
    aten.linalg_vector_norm.default: _norm,
    aten.sgn.default: _sign,
    aten.exp.default: _exponential,
    aten.log.default: _logarithm,
    aten.sqrt.default: _root,
    aten.pow.Tensor_Scalar: _power,
    aten._to_copy.default: _cast,
    aten.full.default: _full,
    aten.zeros.default: _full_of(0),
    aten.ones.default: _full_of(1),
    aten.full_like.default: _full_like,
    aten.zeros_like.default: _like_of(0),
    aten.ones_like.default: _like_of(1),
    aten.new_zeros.default: _new_of(0),
    aten.new_ones.default: _new_of(1),
}

WRITTEN_OUT = (aten.einsum.default, aten.linear.default, aten.matmul.default, aten.pad.default)
"""Operators that are kept over real numbers, and decomposed by PyTorch in a program with complex ones."""
