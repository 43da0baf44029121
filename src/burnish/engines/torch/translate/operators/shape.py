"""Shape arithmetic, and operators that move elements without computing with them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.nn import functional

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.host_shapes import Host
from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates

LARGEST = 2**31 - 1
"""A slice bound from this number on means "to the end"."""


@translates("Shape")
def shape(op: Call) -> Any:
    """Only for an unknown rank: otherwise the host has the extents."""
    return torch.ops.aten._shape_as_tensor.default(op.tensor())[op.attribute("start", 0) : op.attribute("end")].to(op.device)


@translates("Size")
def size(op: Call) -> Any:
    return Host((torch.numel(op.tensor()),), 0, ir.DataType.INT64)


@translates("Reshape")
def reshape(op: Call) -> Any:
    if op.attribute("allowzero", 0):
        return torch.reshape(op.tensor(), op.integers(1))
    return torch.reshape(op.tensor(), _with_copies(op.host_integers(1), op.extents()))


def _with_copies(target: Sequence[Any], extents: Sequence[Any]) -> list[Any]:
    """Return the target with the input's extents for 0, and for -1 if it follows without them: a part of a batch may be empty."""
    copied = [axis for axis, extent in enumerate(target) if isinstance(extent, int) and extent == 0]
    read = [extent for axis, extent in enumerate(extents) if axis not in copied]
    given = [
        extent for axis, extent in enumerate(target) if axis not in copied and not (isinstance(extent, int) and extent == -1)
    ]
    settled = [extents[axis] if axis in copied else extent for axis, extent in enumerate(target)]
    for axis, extent in enumerate(settled[: len(extents)]):
        if isinstance(extent, fx.Proxy) and _may_vanish(extent.node):
            settled[axis] = extent + operator.eq(extent, 0) * extents[axis]
    if copied and len(given) + len(copied) < len(target) and all(isinstance(extent, int) for extent in (*read, *given)):
        rest = math.prod(read) // max(1, math.prod(given))
        settled = [rest if isinstance(extent, int) and extent == -1 else extent for extent in settled]
    return settled


def _may_vanish(node: fx.Node) -> bool:
    """True if a number of the host may be 0 although no extent is: a difference, a quotient, a remainder."""
    if node.target in (operator.sub, operator.floordiv, operator.mod):
        return True
    combines = node.target in (operator.add, operator.mul, torch.sym_max, torch.sym_min)
    return combines and any(map(_may_vanish, node.all_input_nodes))


@translates("Flatten")
def flatten(op: Call) -> Any:
    rank, axis = op.rank(), op.attribute("axis", 1)
    axis = axis % rank if rank and axis != rank else axis
    x = op.tensor()
    if axis == 0:
        return torch.reshape(x, [1, -1])
    return torch.flatten(torch.flatten(x, 0, axis - 1), 1, -1) if axis < rank else torch.reshape(x, [-1, 1])


@translates("Squeeze", since=13)
def squeeze(op: Call) -> Any:
    return torch.squeeze(op.tensor(), tuple(op.known_integers(1, ()))) if op.has(1) else torch.squeeze(op.tensor())


@translates("Unsqueeze", since=13)
def unsqueeze(op: Call) -> Any:
    axes = op.known_integers(1, ())
    x, rank = op.tensor(), op.rank() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = torch.unsqueeze(x, axis)
    return x


@translates("Transpose")
def transpose(op: Call) -> Any:
    order = op.attribute("perm")
    return torch.permute(op.tensor(), list(range(op.rank()))[::-1] if order is None else list(order))


@translates("Concat")
def concat(op: Call) -> Any:
    return torch.cat(op.tensors(), op.attribute("axis"))


@translates("Split", since=13)
def split(op: Call) -> Any:
    axis, count = op.attribute("axis", 0), len(op.node.outputs)
    if op.has(1):
        parts = torch.split(op.tensor(), op.integers(1), axis)
        return tuple(parts[index] for index in range(count))
    extent = op.extents()[axis]
    parts = torch.split(op.tensor(), (extent + (count - 1)) // count, axis)
    return tuple(parts[index] for index in range(count))


@translates("Slice", since=10)
def slice_(op: Call) -> Any:
    x, starts, ends = op.tensor(), op.integers(1), op.integers(2)
    axes = op.known_integers(3, list(range(len(starts))))
    steps = op.known_integers(4, [1] * len(starts))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            x = _backwards(op, x, start, end, axis, step)
            continue
        if not (isinstance(start, int) and start == 0 and isinstance(end, int) and end >= LARGEST and step == 1):
            end = LARGEST if isinstance(end, int) and end > LARGEST else end
            x = torch.ops.aten.slice.Tensor(x, axis, start, end, step)
    return x


def _backwards(op: Call, x: Any, start: Any, end: Any, axis: int, step: int) -> Any:
    """A slice with a negative step: PyTorch's slices go forward, so the axis is flipped first."""
    if not (isinstance(start, int) and isinstance(end, int)):
        raise NotKnownYet
    turned = torch.flip(x, [axis])
    extent = op.extents()[axis % op.rank()]
    # After the flip: position p counted from the end is extent - 1 - p from the start.
    first = -1 - start if start < 0 else extent - 1 - start
    last = LARGEST if end < -LARGEST else (-1 - end if end < 0 else extent - 1 - end)
    first = max(first, 0) if isinstance(first, int) else torch.sym_max(first, 0)  # type: ignore[no-untyped-call]
    return torch.ops.aten.slice.Tensor(turned, axis, first, last, -step)


@translates("Expand")
def expand(op: Call) -> Any:
    target, own = op.integers(1), op.extents()
    rank = max(len(target), len(own))
    own = [1] * (rank - len(own)) + own
    target = [1] * (rank - len(target)) + target
    return torch.broadcast_to(op.tensor(), [_common(*pair) for pair in zip(target, own, strict=True)])


def _common(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int):
            return other if one == 1 else one
    return left if left is right else torch.sym_max(left, right)  # type: ignore[no-untyped-call]


@translates("Tile")
def tile(op: Call) -> Any:
    return torch.tile(op.tensor(), op.integers(1))


@translates("ConstantOfShape")
def constant_of_shape(op: Call) -> Any:
    value = op.attribute("value")
    dtype = torch.float32 if value is None else TORCH_DTYPES[value.dtype]
    fill = 0.0 if value is None else value.numpy().reshape(-1)[0].item()
    return torch.full(op.integers(0), fill, dtype=dtype, device=op.device)


@translates("Range")
def range_(op: Call) -> Any:
    start, end, step = (op.integers(index)[0] if op.dtype(index).is_integer() else op.operand(index) for index in range(3))
    if not op.dtype(0).is_integer():
        # PyTorch refuses bounds of an empty range; the number of steps may be zero.
        if not all(isinstance(bound, (int, float)) for bound in (start, end, step)):
            raise NotKnownYet
        count = max(math.ceil((end - start) / step), 0)
        return (start + torch.arange(count, dtype=torch.float64, device=op.device) * step).to(op.torch_dtype(0))
    if not isinstance(step, int):
        raise NotKnownYet
    if isinstance(start, int) and isinstance(end, int):
        end = max(start, end) if step > 0 else min(start, end)
    elif not (isinstance(start, int) and start == 0 and step > 0 and _is_extent(end)):
        end = (torch.sym_max if step > 0 else torch.sym_min)(start, end)  # type: ignore[no-untyped-call]
    return torch.arange(start, end, step, dtype=op.torch_dtype(0), device=op.device)


def _is_extent(number: Any) -> bool:
    """True if a number in the traced program is the extent of an axis, which is never negative."""
    return isinstance(number, fx.Proxy) and number.node.target == torch.ops.aten.sym_size.int


@translates("EyeLike")
def eye_like(op: Call) -> Any:
    rows, columns = op.extents()
    declared, offset = op.attribute("dtype"), op.attribute("k", 0)
    dtype = op.torch_dtype(0) if declared is None else TORCH_DTYPES[ir.DataType(declared)]
    row = torch.unsqueeze(torch.arange(rows, device=op.device), 1)
    return torch.eq(row + offset, torch.unsqueeze(torch.arange(columns, device=op.device), 0)).to(dtype)


@translates("Trilu")
def trilu(op: Call) -> Any:
    offset = op.integers(1)[0] if op.has(1) else 0
    return (torch.triu if op.attribute("upper", 1) else torch.tril)(op.tensor(), offset)


@translates("Pad", since=11)
def pad(op: Call) -> Any:
    mode, rank = op.attribute("mode", "constant"), op.rank()
    pads = op.integers(1)
    axes = op.known_integers(3, list(range(rank)))
    by_axis = {axis % rank: (pads[index], pads[index + len(axes)]) for index, axis in enumerate(axes)}
    x = op.tensor()
    if mode == "constant":
        amounts = [amount for axis in reversed(range(rank)) for amount in by_axis.get(axis, (0, 0))]
        number = op.operand(2) if op.has(2) else 0
        fill = number if isinstance(number, int | float) else number.item()
        return functional.pad(x, amounts, "constant", fill)
    for axis, (before, after) in by_axis.items():
        x = _padded(op, x, axis, before, after, mode)
    return x


@translates("CenterCropPad")
def center_crop_pad(op: Call) -> Any:
    """Zeros around a short axis, and the middle of a long one; an odd difference has one more at the end."""
    extents, rank = op.extents(), op.rank()
    amounts: list[Any] = [0] * 2 * rank
    for axis, target in zip(op.attribute("axes", range(rank)), op.integers(1), strict=True):
        axis %= rank
        if target is extents[axis]:
            continue
        if not (isinstance(target, int) and isinstance(extents[axis], int)):
            raise NotKnownYet
        missing = target - extents[axis]
        before = missing // 2 if missing >= 0 else -(-missing // 2)
        place = 2 * (rank - 1 - axis)
        amounts[place : place + 2] = before, missing - before
    return functional.pad(op.tensor(), amounts, "constant", 0)


def _padded(op: Call, x: Any, axis: int, before: Any, after: Any, mode: str) -> Any:
    """Pad one axis by gathering the source position of each element; PyTorch's own modes only support the last axes."""
    extent = op.extents()[axis]
    places = torch.arange(-before, extent + after, device=op.device)
    if mode == "edge":
        places = torch.clamp(places, 0, extent - 1)
    elif mode == "wrap":
        places = torch.remainder(places, extent)
    else:
        # A single element reflects only itself.
        period = 2 * (extent - 1)
        around = torch.remainder(places, period + (extent == 1))
        places = torch.minimum(around, period - around)
    return torch.index_select(x, axis, places)


@translates("DepthToSpace")
def depth_to_space(op: Call) -> Any:
    x, block = op.tensor(), op.attribute("blocksize")
    if op.attribute("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    batch, channels, height, width = op.extents()
    x = torch.reshape(x, [batch, block, block, channels // (block * block), height, width])
    return torch.reshape(
        torch.permute(x, [0, 3, 4, 1, 5, 2]), [batch, channels // (block * block), height * block, width * block]
    )


@translates("SpaceToDepth")
def space_to_depth(op: Call) -> Any:
    x, block = op.tensor(), op.attribute("blocksize")
    batch, channels, height, width = op.extents()
    x = torch.reshape(x, [batch, channels, height // block, block, width // block, block])
    return torch.reshape(
        torch.permute(x, [0, 3, 5, 1, 2, 4]), [batch, channels * (block * block), height // block, width // block]
    )
