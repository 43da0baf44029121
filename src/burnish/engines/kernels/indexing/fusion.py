"""Gradients of Gather, as of embeddings, to a kernel that adds rows."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.kernels.indexing.operators import FUSED_GATHER_GRAD
from burnish.graph import Builder, attribute_value, replace_node
from burnish.graph.constants import constant_array
from burnish.operators.indexing import GATHER_GRAD


def use_gather_kernels(graph: ir.Graph, threads: int) -> None:
    """Put ``burnish.FusedGatherGrad`` in the place of gradients of Gather, in place.

    Of float32 rows read by int64 indices, along an axis whose extent is known. A single constant index is left: there, standard
    operators pad.

    Args:
        graph: the graph.
        threads: among which the kernel divides its work.
    """
    for node in list(graph):
        if not GATHER_GRAD.is_of(node):
            continue
        dy, indices, data = node.inputs
        assert dy is not None
        assert indices is not None
        assert data is not None
        if dy.dtype != ir.DataType.FLOAT or indices.dtype != ir.DataType.INT64 or data.shape is None:
            continue
        axis = attribute_value(node, "axis", 0) % len(data.shape)
        extent, array = data.shape[axis], constant_array(indices)
        if not isinstance(extent, int) or indices.shape is None or (array is not None and array.size == 1):
            continue
        builder = Builder(graph, before=node)
        operands = (builder.tensor(dy), builder.tensor(indices))
        result = FUSED_GATHER_GRAD(*operands, like=builder.tensor(data), axis=axis, extent=extent, threads=threads)
        replace_node(node, result)
