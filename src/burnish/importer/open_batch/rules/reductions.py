"""Operators that work along axes: reductions, softmax, sums and choices along an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import Batch, Operand, Refused

OVER_SAMPLES = (
    "reduces over axis {axis}, in the place of which the samples of a batch stand: whether it means one sample or all of them "
    "cannot be told from a model of one"
)
LOSS_REMEDY = (
    "Where this is the model's own loss, export the model without it, and name the loss to burnish (loss=...); else export it "
    "with an open batch"
)


@opens(*(f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()))
def reduction(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    named: Sequence[int] | None = call.named_axes()
    keeps = bool(call.attribute("keepdims", 1))
    if not named:
        if call.attribute("noop_with_empty_axes", 0):
            return call.over(x)
        named = range(x.rank)
    axes = sorted({axis % x.rank for axis in named})
    value = x.value
    if x.rank == 0:
        value, along, keeps = call.opening.unsqueezed(value, 1), [1], False
    else:
        along = reduced(x, axes)
    in_attribute = "axes" in call.node.attributes
    operands = [value] if in_attribute else [value, call.opening.integers(along)]
    changed = {"axes": along} if in_attribute else {}
    result = call.again(*operands, keepdims=int(keeps), noop_with_empty_axes=None, **changed)[0]
    return [(result, _left(x.batch, along, keeps))]


def reduced(x: Operand, axes: list[int]) -> list[int]:
    """Return the numbers that reduced axes of one sample have beside the samples."""
    assert x.batch is not None
    if not x.batch.is_extra and x.batch.axis in axes:
        raise Refused(OVER_SAMPLES.format(axis=x.batch.axis), LOSS_REMEDY)
    return [axis + (x.batch.is_extra and axis >= x.batch.axis) for axis in axes]


def _left(batch: Batch, along: list[int], keeps: bool) -> Batch:
    return batch if keeps else Batch(batch.axis - sum(axis < batch.axis for axis in along), batch.is_extra)


@opens("ArgMax", "ArgMin")
def position(call: Call) -> Result:
    x = call.operand()
    assert x.batch is not None
    (axis,) = reduced(x, [call.axis(x.rank)])
    return call.again(x.value, axis=axis)[0], _left(x.batch, [axis], bool(call.attribute("keepdims", 1)))


@opens("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK")
def along_axis(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    return call.over(x, axis=call.new_axis(call.axis(x.rank, -1)))


@opens("CumProd", "CumSum")
def running_sum(call: Call) -> Result:
    call.same_for_all(0)
    x = call.operand()
    (axis,) = call.integers(1, "its axis")
    new = call.new_axis(axis % x.rank)
    return call.again(x.value, call.opening.constant(np.asarray(new, dtype=np.int64)))[0], x.batch
