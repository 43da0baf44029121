"""Detection of batch normalization folded into convolutions, as exporters do in evaluation mode."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from burnish.graph import static_shape
from burnish.rewriting.stages import RECOGNIZED

FEWEST = 4
"""Fewest convolutions for a finding: small networks without normalization are common."""


def perhaps_folded(model: ir.Model) -> int:
    """Return the number of convolutions that look as if batch normalization was folded into them, or 0.

    In such a model every convolution has a bias, nothing is normalized, and at least two convolutions have weights of one shape.
    A network designed without normalization looks the same.

    Args:
        model: a canonical model; not changed.
    """
    if not _is_candidate(model.graph):
        return 0
    recognized = model.clone()
    RECOGNIZED.run(recognized, None)
    if any(node.domain == "" and node.op_type.endswith("Normalization") for node in recognized.graph.all_nodes()):
        return 0
    return len(_convolutions(model.graph))


def _is_candidate(graph: ir.Graph) -> bool:
    convolutions = _convolutions(graph)
    if len(convolutions) < FEWEST or not all(_has_bias(node) for node in convolutions):
        return False
    shapes = Counter(static_shape(node.inputs[1]) for node in convolutions if node.inputs[1] is not None)
    return any(count > 1 for shape, count in shapes.items() if shape is not None)


def _convolutions(graph: ir.Graph) -> list[ir.Node]:
    nodes = (node for node in graph.all_nodes() if node.domain == "" and node.op_type == "Conv")
    return [node for node in nodes if node.inputs[1] is not None and node.inputs[1].is_initializer()]


def _has_bias(node: ir.Node) -> bool:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return bias is not None and bias.is_initializer()
