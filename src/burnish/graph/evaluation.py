"""A node computed when a graph is made, by the standard's own evaluator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from burnish.graph.constants import constant_array


def evaluated(node: ir.Node, operands: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return the outputs of a node for operands by name; nothing where the evaluator fails: computing early is never needed."""
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset}).run(None, dict(operands))
    except Exception:
        return []
    return [np.asarray(result) for result in results]


def constant_result(value: ir.Value, opset: int) -> np.ndarray | None:
    """Return what nodes of the standard make of constants alone, such as a transposed or a dequantized weight.

    Args:
        value: of a graph of this opset.
        opset: the version of the standard's operators.

    Returns:
        The array; None where it hangs on an input, or cannot be computed.
    """
    arrays: dict[ir.Value, np.ndarray] = {}
    pending = [value]
    while pending:
        current = pending[-1]
        array, node = constant_array(current), current.producer()
        if array is None and (node is None or node.domain != ""):
            return None
        operands = [] if node is None or array is not None else [operand for operand in node.inputs if operand is not None]
        missing = [operand for operand in operands if operand not in arrays]
        if missing:
            pending += missing
            continue
        if array is not None:
            arrays[current] = array
        else:
            assert node is not None
            results = evaluated(node, {operand.name or "": arrays[operand] for operand in operands}, opset)
            if not results:
                return None
            arrays.update(zip(node.outputs, results, strict=False))
        pending.pop()
    return arrays[value]
