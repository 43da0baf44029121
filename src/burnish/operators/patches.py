"""Images as patches: Col2Im, which adds overlapping blocks up to an image."""

from __future__ import annotations

import numpy as np

from burnish.errors import GradientError
from burnish.graph import Tensor
from burnish.operators.interpolation import range_of
from burnish.operators.positions import reshape_as
from burnish.operators.registry import Operation, gradient


@gradient("Col2Im")
def columns_to_image(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """Each element of a block receives dy from where it was added: the blocks of the padded image, cut along axis after axis."""
    columns, builder = op.required(0), op.builder
    axes = op.required(1).dimension(0) or op.required(2).dimension(0)
    if axes is None:
        raise GradientError(
            f"{op}: the length of its image_shape '{op.required(1).name}' is not known, so nor is the number of spatial axes; "
            "make image_shape a constant, or declare its shape"
        )
    strides, dilations = (op.attribute(name, (1,) * axes) for name in ("strides", "dilations"))
    pads = op.attribute("pads", (0,) * 2 * axes)
    cut = dy
    if any(pads):
        cut = builder.op("Pad", cut, builder.integers([0, 0, *pads[:axes], 0, 0, *pads[axes:]]))
    for axis in range(axes):
        size, extent = _number(op, 2, axis), _number(op, 1, axis)
        room = extent + (pads[axis] + pads[axes + axis] - 1) - (size - 1) * dilations[axis]
        count = room // strides[axis] + 1 if isinstance(room, int) else room / strides[axis] + 1
        inside = builder.op("Unsqueeze", range_of(size, builder) * dilations[axis], builder.integers([1]))
        cut = builder.op("Gather", cut, inside + range_of(count, builder) * strides[axis], axis=2 + 2 * axis)
    inside_blocks, blocks = range(2, 2 + 2 * axes, 2), range(3, 2 + 2 * axes, 2)
    return (reshape_as(builder.op("Transpose", cut, perm=[0, 1, *inside_blocks, *blocks]), columns),)


def _number(op: Operation, index: int, axis: int) -> int | Tensor:
    """An entry of an input: an int where the input is constant, else an int64 scalar."""
    vector = op.required(index)
    if vector.array is not None:
        return int(vector.array.reshape(-1)[axis])
    return op.builder.op("Gather", vector, op.builder.constant(np.array(axis)), axis=0)
