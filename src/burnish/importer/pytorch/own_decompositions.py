"""Decompositions missing in PyTorch, for operators that the exporter cannot translate correctly.

Each takes an operator's arguments and returns its result, or ``NotImplemented`` to keep the operator. Gradients equal PyTorch's,
also at ties.

Complex operators become operators on real and imaginary parts. The exporter stores complex tensors as pairs and can translate
only a few operators on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def average_pool(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """``avg_pool2d`` and ``avg_pool3d`` with a custom divisor: a scaled pool over padded values."""
    if divisor_override is None:
        return NotImplemented
    rank = len(kernel_size)
    pool = aten.avg_pool2d.default if rank == 2 else aten.avg_pool3d.default
    kernel, pads = _each(kernel_size, rank), _each(padding, rank)
    strides = _each(stride, rank) if len(stride) else kernel
    following = []
    for extent, size, step, pad in zip(x.shape[-rank:], kernel, strides, pads, strict=True):
        results = (extent + 2 * pad - size + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (results - 1) * step >= extent + pad:
            results = results - 1
        following.append(max((results - 1) * step + size - extent - pad, 0) if ceil_mode else pad)
    edges = [edge for pad, last in zip(reversed(pads), reversed(following), strict=True) for edge in (pad, last)]
    padded = aten.constant_pad_nd.default(x, edges, 0.0) if any(edges) else x
    count = 1
    for size in kernel:
        count *= size
    return pool(padded, kernel, strides) * (count / divisor_override)


def _each(setting: Sequence[int], rank: int) -> list[int]:
    return list(setting) * rank if len(setting) == 1 else list(setting)


def scatter_means(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """``scatter_reduce`` by means: sums divided by counts."""
    if reduce != "mean":
        return NotImplemented
    for axis in range(index.dim()):
        src = src.narrow(axis, 0, index.shape[axis]) if src.shape[axis] != index.shape[axis] else src
    ones = torch.ones_like(src)
    if include_self:
        total = x.scatter_reduce(dim, index, src, "sum")
        count = torch.ones_like(x).scatter_reduce(dim, index, ones, "sum")
    else:
        total = torch.zeros_like(x).scatter_reduce(dim, index, src, "sum")
        count = torch.zeros_like(x).scatter_reduce(dim, index, ones, "sum")
    least = count if include_self else count.clamp(min=1)
    mean = total / least if x.is_floating_point() else torch.div(total, least, rounding_mode="floor")
    return mean if include_self else torch.where(count > 0, mean, x)


def average_to(x: Any, output_size: Sequence[int]) -> Any:
    """``adaptive_avg_pool3d``: means along one axis after the other, since windows are boxes."""
    if _is_even(x.shape[-len(output_size) :], output_size):
        return NotImplemented
    for axis, size in enumerate(output_size, start=-len(output_size)):
        inside = _windows(x.shape[axis], size).to(x.dtype)
        x = (x.transpose(axis, -1) @ (inside / inside.sum(-1, keepdim=True)).transpose(0, 1)).transpose(axis, -1)
    return x


def maximum_to(x: Any, output_size: Sequence[int]) -> Any:
    """``adaptive_max_pool2d``: maxima along the last axis, then the one before; the first of ties."""
    height, width = x.shape[-2:]
    if list(output_size) == [1, 1]:
        return tuple(each.unsqueeze(-1) for each in x.flatten(-2).max(-1, keepdim=True))
    if _is_even((height, width), output_size):
        return torch._decomp.decomposition_table[aten.adaptive_max_pool2d.default](x, output_size)
    rows, columns = output_size
    least = torch.full((), float("-inf"), dtype=x.dtype)
    in_rows, column = torch.where(_windows(width, columns), x.unsqueeze(-2), least).max(-1)
    along = in_rows.transpose(-1, -2).unsqueeze(-2)
    values, row = torch.where(_windows(height, rows), along, least).max(-1)
    indices = row * width + column.transpose(-1, -2).gather(-1, row)
    return values.transpose(-1, -2), indices.transpose(-1, -2)


def _is_even(extents: Sequence[Any], results: Sequence[int]) -> bool:
    pairs = zip(extents, results, strict=True)
    return all(size == 1 or (isinstance(extent, int) and extent % size == 0) for extent, size in pairs)


def _windows(extent: Any, results: int) -> Any:
    """Return a mask ``[results, extent]`` of the positions in each window."""
    number, places = torch.arange(results).unsqueeze(1), torch.arange(extent).unsqueeze(0)
    return (places >= number * extent // results) & (places < ((number + 1) * extent + results - 1) // results)


def distances(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """``cdist``: norms of differences, with gradient 0 if the difference is 0."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def sums_of_products(
    x: Any,
    y: Any,
    z: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """``_trilinear`` as used by ``nn.Bilinear``."""
    if (list(expand1), list(expand2), list(expand3), list(sumdim)) != ([1, 3], [0], [1, 2], [2, 3]):
        return NotImplemented
    return torch.einsum("bi,oij,bj->bo", x, y, z)


def cumulative_product(x: Any, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """``cumprod``: products of the entries up to each, for correct gradients at zeros."""
    x = x if dtype is None else x.to(dtype)
    if not x.dim():
        return x.clone()
    x = x.movedim(dim, -1)
    places = torch.arange(x.shape[-1])
    before = places.unsqueeze(0) <= places.unsqueeze(1)
    factors = torch.where(before, x.unsqueeze(-2), torch.ones((), dtype=x.dtype))
    return factors.prod(-1).movedim(-1, dim)


def greatest_so_far(x: Any, dim: int) -> Any:
    """``cummax``: the last of ties."""
    return _extreme_so_far(x, dim, float("-inf"), torch.Tensor.amax)


def least_so_far(x: Any, dim: int) -> Any:
    """``cummin``."""
    return _extreme_so_far(x, dim, float("inf"), torch.Tensor.amin)


def _extreme_so_far(x: Any, dim: int, outside: float, extreme: Callable[..., Any]) -> Any:
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    moved = x.movedim(dim, -1)
    places = torch.arange(moved.shape[-1])
    before = places.unsqueeze(0) <= places.unsqueeze(1)
    entries = torch.where(before, moved.detach().unsqueeze(-2), torch.full((), outside, dtype=x.dtype))
    is_extreme = before & ((entries == extreme(entries, -1, keepdim=True)) | entries.isnan())
    index = torch.where(is_extreme, places, torch.full((), -1)).amax(-1)
    return moved.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)


def lengths(x: Any, y: Any) -> Any:
    """``hypot`` as the norm of a pair."""
    return torch.linalg.vector_norm(torch.stack(aten.broadcast_tensors.default([x, y])), 2, 0)


def greater_number(x: Any, y: Any) -> Any:
    """``fmax``: the maximum, ignoring a NaN."""
    return torch.where((x >= y) | y.isnan(), x, y) if x.is_floating_point() else torch.maximum(x, y)


def lesser_number(x: Any, y: Any) -> Any:
    """``fmin``: the minimum, ignoring a NaN."""
    return torch.where((x <= y) | y.isnan(), x, y) if x.is_floating_point() else torch.minimum(x, y)


def with_sign(x: Any, y: Any) -> Any:
    """``copysign``: a magnitude with the sign of y, including that of zero."""
    return torch.where((y < 0) | ((y == 0) & (1 / y < 0)), -x.abs(), x.abs())


def greatest(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``amax`` over all axes, which its translation does not support."""
    return _over_all_axes(aten.amax.default, x, dim, keepdim)


def least(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """``amin`` over all axes."""
    return _over_all_axes(aten.amin.default, x, dim, keepdim)


def _over_all_axes(reduce: Callable[..., Any], x: Any, dim: Sequence[int], keepdim: bool) -> Any:
    if not x.dim():
        return x.clone()
    return NotImplemented if len(dim) else reduce(x, list(range(x.dim())), keepdim)


def stable_sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """``sort(stable=True)``: the translation is always stable."""
    return torch.sort(x, dim, descending)


def kth_value(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """``kthvalue``: one position of the sorted values."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    values, indices = (sorted_along.select(dim, k - 1) for sorted_along in torch.sort(x, dim))
    return (values.unsqueeze(dim), indices.unsqueeze(dim)) if keepdim else (values, indices)


def median_along(x: Any, dim: int, keepdim: bool = False) -> Any:
    """``median`` along an axis: the lower of two middle values; NaN if there is one."""
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    values, indices = kth_value(x, (x.shape[dim] + 1) // 2, dim, True)
    if x.is_floating_point():
        is_nan = x.isnan()
        indices = torch.where(is_nan.any(dim, True), is_nan.long().argmax(dim, True), indices)
        values = x.gather(dim, indices)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def median_of_all(x: Any) -> Any:
    """``median`` of all entries; ties share its gradient."""
    value, _ = median_along(x.flatten(), 0)
    if not x.is_floating_point():
        return value
    equal = x == value
    shared = torch.where(equal, x, torch.zeros((), dtype=x.dtype)).sum() / equal.sum().to(x.dtype)
    return torch.where(equal.any(), shared, value)


def bags(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Sums and means of ``embedding_bag`` in float64; the translation uses float32."""
    if weight.dtype != torch.float64 or mode == 2 or scale_grad_by_freq:
        return NotImplemented
    first = offsets[:-1] if include_last_offset else offsets
    bag = (torch.arange(indices.shape[0]).unsqueeze(1) >= first.unsqueeze(0)).sum(1) - 1
    counted = torch.ones_like(indices) if padding_idx < 0 else (indices != padding_idx).long()
    rows = weight.index_select(0, indices) * counted.unsqueeze(1)
    rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
    sums = torch.zeros((first.shape[0], weight.shape[1]), dtype=weight.dtype).index_add(0, bag, rows)
    sizes = torch.zeros_like(first).index_add(0, bag, counted)
    result = sums / sizes.clamp(min=1).unsqueeze(1) if mode == 1 else sums
    return result, bag, sizes, sizes


def bags_with_padding(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Any:
    """The overload with ``padding_idx``."""
    padding = -1 if padding_idx is None else padding_idx + (weight.shape[0] if padding_idx < 0 else 0)
    return bags(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding)


OWN: dict[Any, Callable[..., Any]] = {
    aten.avg_pool2d.default: average_pool,
    aten.avg_pool3d.default: average_pool,
    aten._adaptive_avg_pool3d.default: average_to,
    aten.adaptive_max_pool2d.default: maximum_to,
    aten.scatter_reduce.two: scatter_means,
    aten._cdist_forward.default: distances,
    aten.cumprod.default: cumulative_product,
    aten.cummax.default: greatest_so_far,
    aten.cummin.default: least_so_far,
    aten.hypot.default: lengths,
    aten._trilinear.default: sums_of_products,
    aten.fmax.default: greater_number,
    aten.fmin.default: lesser_number,
    aten.copysign.Tensor: with_sign,
    aten.amax.default: greatest,
    aten.amin.default: least,
    aten.sort.stable: stable_sort,
    aten.kthvalue.default: kth_value,
    aten.embedding_bag.default: bags,
    aten.embedding_bag.padding_idx: bags_with_padding,
    aten.median.dim: median_along,
    aten.median.default: median_of_all,
}


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
    """Return real and imaginary part; None as the latter for real values."""
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
"""Operators that are kept for real numbers but decomposed by PyTorch in programs with complex ones."""
