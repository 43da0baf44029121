"""What a classifier calls its classes: the labels that it gives, in the order of the indices that a loss compares with."""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from burnish.graph import constant_array
from burnish.graph.uses import origin_of, producer_of

CLASSES = "burnish.classes"
"""The entry of a model's metadata with the names of its classes in the order of their indices: JSON, a list."""
CLASS_NUMBERS = "burnish.class_numbers"
"""The entry with the integers that a classifier calls its classes, where they are not their indices: JSON, a list."""

_PASSES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def note_class_labels(model: ir.Model) -> None:
    """Write, in place, into the metadata what a classifier calls its classes, unless that is said there.

    A label is taken out of constant texts or integers by the place of the largest score; integers that are 0, 1, 2 and on are no
    names.
    """
    if CLASSES in model.metadata_props:
        return
    for output in model.graph.outputs:
        labels = _labels(output)
        if labels is None:
            continue
        if labels.dtype.kind in "iu":
            if np.array_equal(labels, np.arange(labels.size)):
                continue
            model.metadata_props[CLASS_NUMBERS] = json.dumps(labels.tolist())
            names = [str(label) for label in labels.tolist()]
        else:
            names = [label.decode() if isinstance(label, bytes) else str(label) for label in labels.tolist()]
        model.metadata_props[CLASSES] = json.dumps(names, ensure_ascii=False)
        return


def _labels(output: ir.Value) -> np.ndarray | None:
    """The labels [classes] out of which an output is gathered by the place of the largest score; None where it is not."""
    node = producer_of(origin_of(output, _PASSES), "Gather")
    if node is None or None in node.inputs:
        return None
    table, index = (origin_of(value, _PASSES) for value in node.inputs if value is not None)
    array = constant_array(table)
    if producer_of(index, "ArgMax", "Greater") is None or array is None or array.dtype.kind not in "iuSUO":
        return None
    return array.reshape(-1)
