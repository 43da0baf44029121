"""Defaults of the standard that its own shape inference does not apply, written on the nodes."""

from __future__ import annotations

import onnx_ir as ir

_MEAN_VARIANCE_AXES = [0, 2, 3]
"""Of MeanVarianceNormalization, in every version."""


def state_defaults(model: ir.Model) -> None:
    """Give, in place, each MeanVarianceNormalization without axes those that the standard says it has.

    The standard's inference expands the operator's function body, which has no default, and fails.
    """
    for node in model.graph.all_nodes():
        if node.op_type == "MeanVarianceNormalization" and node.domain == "":
            node.attributes.setdefault("axes", ir.AttrInt64s("axes", _MEAN_VARIANCE_AXES))
