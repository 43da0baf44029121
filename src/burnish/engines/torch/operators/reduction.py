"""Reductions over axes, cumulative sums, the largest elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from burnish.engines.torch.translation import Call, translates


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
    if axes is None:
        raise op.unsupported("its axes are computed when it runs", "export the model with constant axes")
    if not axes:
        if op.attribute("noop_with_empty_axes", 0):
            return op.tensor()
        axes = list(range(op.rank()))
    axes = [axis % op.rank() for axis in axes]
    result = REDUCTIONS[op.node.op_type](op.tensor(), axes, bool(op.attribute("keepdims", 1))) if axes else op.tensor()
    return result if result is op.tensor() or op.dtype(0).is_floating_point() else result.to(op.torch_dtype(0))


@translates("ArgMax", "ArgMin")
def argument(op: Call) -> Any:
    if op.attribute("select_last_index", 0):
        raise op.unsupported("select_last_index=1 picks the last of equal elements")
    function = torch.argmax if op.node.op_type == "ArgMax" else torch.argmin
    return function(op.tensor(), op.attribute("axis", 0), keepdim=bool(op.attribute("keepdims", 1)))


@translates("CumSum")
def cumulative_sum(op: Call) -> Any:
    axes = op.known_integers(1)
    if axes is None:
        raise op.unsupported("its axis is computed when it runs", "export the model with a constant axis")
    x, axis = op.tensor(), axes[0]
    reverse = bool(op.attribute("reverse", 0))
    x = torch.flip(x, [axis]) if reverse else x
    total = torch.cumsum(x, axis, dtype=op.torch_dtype(0))
    total = total - x if op.attribute("exclusive", 0) else total
    return torch.flip(total, [axis]) if reverse else total


@translates("TopK", since=10)
def top_k(op: Call) -> Any:
    (count,) = op.integers(1)
    x, axis, largest = op.tensor(), op.attribute("axis", -1), bool(op.attribute("largest", 1))
    # Of equal elements ONNX takes the first; PyTorch's own topk takes any.
    values, indices = torch.sort(x, dim=axis, descending=largest, stable=True)
    return torch.narrow(values, axis, 0, count), torch.narrow(indices, axis, 0, count)
