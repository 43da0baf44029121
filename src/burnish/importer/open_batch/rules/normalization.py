"""Normalization over the last axes."""

from __future__ import annotations

import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import FIRST, Operand, Refused
from burnish.importer.open_batch.rules.elements import check_shape_stays
from burnish.importer.open_batch.rules.reductions import reduced


@opens("LayerNormalization", "RMSNormalization")
def last_axes(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    first = call.axis(x.rank, -1)
    if not x.batch.is_extra and x.batch.axis >= first:
        raise Refused(f"normalizes over the axes from {first} on, among which the samples of a batch stand")
    if x.batch.axis > first:
        x = Operand(call.opening.placed(x, FIRST), x.shape, FIRST)
        assert x.batch is not None
    weights = [_beside(call, operand, x) for operand in call.operands[1:]]
    axis = first - x.rank
    return [(value, x.batch) for value in call.again(x.value, *weights, axis=axis)]


@opens("MeanVarianceNormalization")
def over_axes(call: Call) -> Result:
    x = call.operand()
    axes = [axis % x.rank for axis in call.attribute("axes", None) or (0, 2, 3)]
    return call.again(x.value, axes=reduced(x, axes))[0], x.batch


def _beside(call: Call, weight: Operand | None, x: Operand) -> ir.Value | None:
    """A scale or bias, which is broadcast against what it is for: with an axis for the samples where it reaches past that."""
    assert x.batch is not None
    if weight is None:
        return None
    check_shape_stays(x, weight)
    missing = x.rank - weight.rank
    if not x.batch.is_extra or x.batch.axis <= missing:
        return weight.value
    return call.opening.unsqueezed(weight.value, x.batch.axis - missing)
