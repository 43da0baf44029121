"""Which axis of an input holds the samples of a batch, in the metadata of the input: copies, saved models and exports keep it."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.settings import is_natural_text

KEY = "burnish.sample_axis"
NOTHING = "none"
UNNAMED_AXES = "burnish.unnamed_axes"
"""The entry of an input's ``meta`` that lists its axes with open dimensions without a name in the file."""


def mark_sample_axis(value: ir.Value, axis: int | None) -> None:
    """Note the axis of an input along which samples stand; None: it has no samples, and is the same for all of them."""
    value.metadata_props[KEY] = NOTHING if axis is None else str(axis)


def has_sample_axis_mark(value: ir.Value) -> bool:
    """Whether a graph says which axis of an input holds samples."""
    return KEY in value.metadata_props


def marked_sample_axis(value: ir.Value) -> int | None:
    """Return the axis that is noted: 0 without a note; None for an input without samples, and one without axes.

    Raises:
        ModelError: the note is no axis of the input.
    """
    rank = None if value.shape is None else len(value.shape)
    text = value.metadata_props.get(KEY, "0" if rank != 0 else NOTHING)
    if text == NOTHING:
        return None
    if not is_natural_text(text) or (rank is not None and int(text) >= rank):
        raise ModelError(
            f"the metadata '{KEY}' of the input '{value.name}' of shape {value.shape} is {text!r}, which is no axis of it: say "
            "which axis holds the samples (sample_axis=..., --sample-axis), or export the model again"
        )
    return int(text)
