"""A file of one sample whose outputs do not say so: what they come to is seen by running it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import onnx_ir as ir

from burnish import engines
from burnish.errors import BurnishError
from burnish.graph.annotations import marked_sample_axis

OPEN_EXTENT = 2
"""What is tried for an extent that is open, such as the number of tokens."""


def takes_one_sample(model: ir.Model) -> bool:
    """Whether all inputs that have samples hold one, along an axis that is marked or the first."""
    axes = [(value.shape, marked_sample_axis(value)) for value in model.graph.inputs]
    held = [shape is not None and len(shape) > 1 and shape[axis] == 1 for shape, axis in axes if axis is not None]
    return bool(held) and all(held)


def settle_outputs(model: ir.Model) -> None:
    """Give outputs a first extent of 1 where one sample gives that and their shape leaves it open; in place.

    PyTorch's older exporter writes shapes with ``Where`` and ``Expand``, behind which no inference follows the sample. An output
    whose first axis is not known to be that of the sample would get another one when the batch is opened.

    Args:
        model: a canonical model that takes one sample.
    """
    open_ones = [value for value in model.graph.outputs if value.shape is not None and value.shape and _is_open(value.shape[0])]
    if not open_ones:
        return
    feeds = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        extents = [extent if isinstance(extent, int) else OPEN_EXTENT for extent in value.shape]
        feeds[str(value.name)] = np.zeros(extents, value.dtype.numpy())
    with suppress(BurnishError):  # of a model that does not run on zeros the outputs stay as they are
        outputs = engines.get("auto").load(model)(feeds)
        for value in open_ones:
            assert value.shape is not None
            if outputs[str(value.name)].shape[:1] == (1,):
                value.shape = ir.Shape([1, *value.shape.dims[1:]])


def _is_open(extent: int | ir.SymbolicDim) -> bool:
    return not isinstance(extent, int)
