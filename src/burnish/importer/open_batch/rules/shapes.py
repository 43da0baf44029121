"""Operators that read the shape of what holds samples: they read that of one."""

from __future__ import annotations

from burnish.importer.open_batch.call import Call, Result, opens


@opens("Shape")
def shape(call: Call) -> Result:
    x = call.operand()
    start, end = call.attribute("start", 0), call.attribute("end", x.rank)
    return call.opening.vector(call.opening.extents(x)[start:end]), None


@opens("Size")
def size(call: Call) -> Result:
    opening = call.opening
    extents = opening.vector(opening.extents(call.operand()))
    return opening.emit("ReduceProd", extents, keepdims=0), None
