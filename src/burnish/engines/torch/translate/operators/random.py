"""Operators that draw from the runtime's own generator; training draws from a key, in other operators."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates


@translates("Dropout")
def dropout(op: Call) -> Any:
    """Inference does nothing; training mode keeps the elements whose random number is above the ratio."""
    x = op.tensor(0)
    mode = op.known(2)
    if op.has(2) and mode is None:
        raise NotKnownYet
    if mode is None or not mode.item():
        return x, torch.ones_like(x, dtype=torch.bool) if op.is_read(1) else None
    ratio = op.operand(1) if op.has(1) else 0.5
    mask = torch.rand_like(x, dtype=torch.float32) >= ratio
    return torch.where(mask, x / (1 - ratio), torch.zeros_like(x)), mask


@translates("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def random(op: Call) -> Any:
    name = op.node.op_type
    shape = op.extents() if name.endswith("Like") else list(op.attribute("shape"))
    declared = op.attribute("dtype")
    own = op.torch_dtype(0) if name.endswith("Like") and declared is None else torch.float32
    dtype = own if declared is None else torch_dtype(ir.DataType(declared))
    if name.startswith("RandomUniform"):
        low, high = op.attribute("low", 0.0), op.attribute("high", 1.0)
        return torch.rand(shape, dtype=dtype, device=op.device) * (high - low) + low
    return torch.randn(shape, dtype=dtype, device=op.device) * op.attribute("scale", 1.0) + op.attribute("mean", 0.0)


@translates("Bernoulli")
def bernoulli(op: Call) -> Any:
    declared = op.attribute("dtype")
    return torch.bernoulli(op.tensor()).to(op.torch_dtype(0) if declared is None else torch_dtype(ir.DataType(declared)))


@translates("Multinomial")
def multinomial(op: Call) -> Any:
    drawn = torch.multinomial(torch.softmax(op.tensor(), 1), op.attribute("sample_size", 1), True)
    return drawn.to(torch_dtype(ir.DataType(op.attribute("dtype", int(ir.DataType.INT32)))))
