"""A node computed when a graph is made, by the standard's own evaluator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator


def evaluated(node: ir.Node, operands: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return the outputs of a node for operands by name; nothing where the evaluator fails: computing early is never needed."""
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset}).run(None, dict(operands))
    except Exception:
        return []
    return [np.asarray(result) for result in results]
