"""Matrix products, reductions over axes, cumulative sums, the largest elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.rules import Call, translates


@translates("MatMul")
def matmul(op: Call) -> Any:
    return torch.matmul(op.tensor(0), op.tensor(1))


@translates("Gemm")
def general_matmul(op: Call) -> Any:
    left, right = op.tensor(0), op.tensor(1)
    left = left.t() if op.attribute("transA", 0) else left
    right = right.t() if op.attribute("transB", 0) else right
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    if op.has(2) and beta != 0.0 and op.dtype(0).is_floating_point():
        return torch.addmm(op.tensor(2), left, right, beta=beta, alpha=alpha)
    product = torch.mm(left, right)
    product = product if alpha == 1.0 else product * alpha
    return product + op.tensor(2) * beta if op.has(2) and beta != 0.0 else product


@translates("Einsum")
def einsum(op: Call) -> Any:
    return torch.einsum(op.attribute("equation").replace(" ", ""), *op.tensors())


@translates("Det")
def determinant(op: Call) -> Any:
    return torch.linalg.det(op.tensor())


def _product(x: Any, axes: list[int], keepdims: bool) -> Any:
    for axis in sorted((axis for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims)
    return x


REDUCTIONS: dict[str, Callable[[Any, list[int], bool], Any]] = {
    "ReduceSum": lambda x, axes, keepdims: torch.sum(x, axes, keepdim=keepdims, dtype=None),
    "ReduceMean": lambda x, axes, keepdims: torch.mean(x, axes, keepdim=keepdims),
    "ReduceMax": lambda x, axes, keepdims: torch.amax(x, axes, keepdim=keepdims),
    "ReduceMin": lambda x, axes, keepdims: torch.amin(x, axes, keepdim=keepdims),
    "ReduceProd": _product,
    "ReduceSumSquare": lambda x, axes, keepdims: torch.sum(x * x, axes, keepdim=keepdims),
    "ReduceL1": lambda x, axes, keepdims: torch.sum(torch.abs(x), axes, keepdim=keepdims),
    "ReduceL2": lambda x, axes, keepdims: torch.sqrt(torch.sum(x * x, axes, keepdim=keepdims)),
    "ReduceLogSum": lambda x, axes, keepdims: torch.log(torch.sum(x, axes, keepdim=keepdims)),
    "ReduceLogSumExp": lambda x, axes, keepdims: torch.logsumexp(x, axes, keepdim=keepdims),
}


@translates(*REDUCTIONS)
def reduction(op: Call) -> Any:
    declared = op.attribute("axes")
    axes = list(declared) if declared is not None else op.known_integers(1, ())
    x, name, rank = op.tensor(), op.node.op_type, op.rank()
    if not axes and not op.attribute("noop_with_empty_axes", 0):
        axes = list(range(rank))
    if not axes:
        return REDUCTIONS[name](torch.unsqueeze(x, 0), [0], False)
    if op.dtype(0) == ir.DataType.BOOL:
        return (torch.amax if name == "ReduceMax" else torch.amin)(x, axes, keepdim=bool(op.attribute("keepdims", 1)))
    result = REDUCTIONS[name](x, [axis % rank for axis in axes], bool(op.attribute("keepdims", 1)))
    return result if op.dtype(0).is_floating_point() else result.to(op.torch_dtype(0))


@translates("ArgMax", "ArgMin")
def argument(op: Call) -> Any:
    function = torch.argmax if op.node.op_type == "ArgMax" else torch.argmin
    x, axis, keepdims = op.tensor(), op.attribute("axis", 0), bool(op.attribute("keepdims", 1))
    if op.attribute("select_last_index", 0):
        return op.extents()[axis] - 1 - function(torch.flip(x, [axis]), axis, keepdim=keepdims)
    return function(x, axis, keepdim=keepdims)


@translates("CumSum")
def cumulative_sum(op: Call) -> Any:
    x, axis = op.tensor(), op.known_integers(1, ())[0]
    reverse = bool(op.attribute("reverse", 0))
    x = torch.flip(x, [axis]) if reverse else x
    total = torch.cumsum(x, axis, dtype=op.torch_dtype(0))
    total = total - x if op.attribute("exclusive", 0) else total
    return torch.flip(total, [axis]) if reverse else total


@translates("CumProd")
def cumulative_product(op: Call) -> Any:
    x, axis = op.tensor(), op.known_integers(1, ())[0]
    reverse = bool(op.attribute("reverse", 0))
    x = torch.flip(x, [axis]) if reverse else x
    if op.attribute("exclusive", 0):
        first = torch.narrow(x, axis, 0, 1)
        x = torch.narrow(torch.cat([torch.ones_like(first), x], axis), axis, 0, op.extents()[axis])
    product = torch.cumprod(x, axis, dtype=op.torch_dtype(0))
    return torch.flip(product, [axis]) if reverse else product


@translates("TopK", since=10)
def top_k(op: Call) -> Any:
    (count,) = op.integers(1)
    x, axis, largest = op.tensor(), op.attribute("axis", -1), bool(op.attribute("largest", 1))
    # ONNX takes the first of equal elements; PyTorch's own topk takes any.
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return torch.narrow(values, axis, 0, count), torch.narrow(indices, axis, 0, count)
