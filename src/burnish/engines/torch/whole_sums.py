"""Sums of long rows in one reduction, for a GPU.

A lowering sums a row in blocks and then their sums, so that rounding errors stay small where terms are added one by one. A GPU
adds within a row as a tree, whose errors are as small, and each stage would be another kernel that waits for the one before.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, constant_array, replace_node
from burnish.graph.uses import is_read_once, producer_of, remove_unread


def sum_whole_rows(graph: ir.Graph) -> None:
    """Put one reduction in the place of those that sum trailing axes block by block, in place."""
    for node in list(graph):
        stages = _stages(node)
        if len(stages) < 2:
            continue
        split = producer_of(stages[-1].inputs[0], "Reshape")
        axes = None if split is None else _split_axes(split, len(stages))
        if split is None or axes is None:
            continue
        builder = Builder(graph, before=node)
        source = split.inputs[0]
        assert source is not None
        total = builder.op(stages[-1].op_type, builder.tensor(source), builder.integers(axes), keepdims=0)
        replace_node(node, builder.op("Unsqueeze", total, builder.integers([-1]), like=builder.tensor(node.outputs[0])))
        remove_unread(graph, *stages[1:], split)


def _stages(node: ir.Node) -> list[ir.Node]:
    """The reductions over the last axis that end in one whose axis stays, the last first; none where a node is no such end."""
    if not _sums_last_axis(node) or not _keeps(node):
        return []
    stages = [node]
    while stages[-1].op_type == "ReduceSum" and (before := producer_of(stages[-1].inputs[0], "ReduceSum", "ReduceSumSquare")):
        if not _sums_last_axis(before) or _keeps(before) or not is_read_once(before.outputs[0]):
            break
        stages.append(before)
    return stages


def _sums_last_axis(node: ir.Node) -> bool:
    if node.op_type not in ("ReduceSum", "ReduceSumSquare") or node.domain != "" or len(node.inputs) != 2:
        return False
    axes = constant_array(node.inputs[1])
    return axes is not None and axes.tolist() == [-1]


def _keeps(node: ir.Node) -> bool:
    return "keepdims" not in node.attributes or node.attributes["keepdims"].as_int() == 1


def _split_axes(split: ir.Node, blocks: int) -> list[int] | None:
    """The axes that a Reshape splits into so many blocks, all from one on; None where it does something else."""
    source, extents = split.inputs[0], constant_array(split.inputs[1])
    if source is None or source.shape is None or extents is None or "allowzero" in split.attributes:
        return None
    leading = len(extents) - blocks
    if leading < 0 or leading >= len(source.shape) or extents[:leading].any() or not (extents[leading:] > 0).all():
        return None
    return list(range(leading, len(source.shape)))
