"""Images as patches."""

from __future__ import annotations

import math
from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates


@translates("Col2Im")
def columns_to_image(op: Call) -> Any:
    """Blocks added up in the padded image, of which the middle is taken."""
    image, block = op.known_integers(1, ()), op.known_integers(2, ())
    axes = len(image)
    strides, dilations = (op.attribute(name, [1] * axes) for name in ("strides", "dilations"))
    pads = op.attribute("pads", [0] * 2 * axes)
    padded = [image[axis] + pads[axis] + pads[axes + axis] for axis in range(axes)]
    # For each axis the places [block, blocks]; together [block, ..., blocks, ...], as the columns have them.
    places: Any = 0
    terms = math.prod(block)
    for axis in range(axes):
        blocks = (padded[axis] - (block[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1
        terms *= blocks
        inside = torch.reshape(torch.arange(block[axis], device=op.device) * dilations[axis], [-1, 1])
        along = inside + torch.arange(blocks, device=op.device) * strides[axis]
        shape = [1] * 2 * axes
        shape[axis], shape[axes + axis] = block[axis], blocks
        places = places + torch.reshape(along * math.prod(padded[axis + 1 :]), shape)
    batch, elements, _ = op.extents()
    channels = elements // math.prod(block)
    flat = torch.zeros([batch, channels, math.prod(padded)], dtype=op.torch_dtype(0), device=op.device)
    columns = torch.reshape(op.tensor(0), [batch, channels, terms])
    total = torch.index_add(flat, 2, torch.reshape(places, [-1]), columns)
    images = torch.reshape(total, [batch, channels, *padded])
    for axis in range(axes):
        images = torch.narrow(images, 2 + axis, pads[axis], image[axis])
    return images
