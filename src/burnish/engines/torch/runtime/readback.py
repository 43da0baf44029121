"""What a step reports, in one transfer: a step reports several numbers, and each transfer of its own would wait for the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from burnish.program.signature import Entry


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors of any dtype and shape, one after another, where the tensors are."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(packed: torch.Tensor, entries: Sequence[Entry], shapes: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Arrays by name of what ``pack`` packed, after waiting for it.

    Args:
        packed: what ``pack`` returned.
        entries: names and dtypes, in the order of the tensors.
        shapes: their shapes.
    """
    data = packed.cpu().numpy().tobytes()
    arrays, offset = {}, 0
    for entry, shape in zip(entries, shapes, strict=True):
        dtype = np.dtype(entry.numpy_dtype)
        count = math.prod(shape)
        arrays[entry.name] = np.frombuffer(data, dtype, count, offset).reshape(tuple(shape)).copy()
        offset += count * dtype.itemsize
    assert offset == len(data), "the entries do not name what was packed"
    return arrays
