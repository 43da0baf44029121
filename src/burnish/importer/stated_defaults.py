"""Defaults of the standard that its own shape inference does not apply, written on the nodes."""

from __future__ import annotations

import onnx_ir as ir

_MEAN_VARIANCE_AXES = [0, 2, 3]
"""Of MeanVarianceNormalization, in every version."""


def state_defaults(model: ir.Model) -> None:
    """Write, in place, defaults on the nodes that leave them out: the axes of MeanVarianceNormalization, ``onesided`` of STFT.

    The standard's inference expands the function body of the first, which has no default, and fails; of the second it takes the
    whole spectrum for the default, which is a half.
    """
    for node in model.graph.all_nodes():
        if node.op_type == "MeanVarianceNormalization" and node.domain == "":
            node.attributes.setdefault("axes", ir.AttrInt64s("axes", _MEAN_VARIANCE_AXES))
        elif node.op_type == "STFT" and node.domain == "":
            node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
