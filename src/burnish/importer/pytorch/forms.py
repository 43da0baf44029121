"""Whether a module computes the same in training and in evaluation, but for normalization and dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

DROPS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("dropout", "dropout_", "feature_dropout", "feature_dropout_")
    for overload in ("default",)
)
"""Operators that ONNX's Dropout stands for, which evaluation leaves out."""

MODES: Mapping[Any, tuple[int, ...]] = {
    aten.batch_norm.default: (5, 6),
    aten.lstm.input: (6,),
    aten.gru.input: (6,),
    aten.rnn_tanh.input: (6,),
    aten.rnn_relu.input: (6,),
    aten.scaled_dot_product_attention.default: (4,),
}
"""Arguments that say no more than what of normalization and dropout a mode asks for."""


def same_but_for_mode(training: fx.Graph, evaluation: fx.Graph) -> bool:
    """Whether two graphs of one module agree where normalization and dropout do not count.

    Args:
        training: the graph in training mode, whose batch normalizations are neutral already.
        evaluation: the graph in evaluation mode.
    """
    mine, theirs = _nodes(training), _nodes(evaluation)
    if len(mine) != len(theirs):
        return False
    pairs = dict(zip(mine, theirs, strict=True))

    def matching(left: Any, right: Any) -> bool:
        if isinstance(left, fx.Node):
            return isinstance(right, fx.Node) and pairs.get(_passed(left)) is _passed(right)
        if isinstance(left, list | tuple):
            return (
                isinstance(right, list | tuple)
                and len(left) == len(right)
                and all(matching(*both) for both in zip(left, right, strict=True))
            )
        if isinstance(left, torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        return type(left) is type(right) and bool(left == right)

    for left, right in pairs.items():
        if left.op != right.op or (left.target != right.target and left.op not in ("placeholder", "get_attr")):
            return False
        if left.op == "get_attr":
            if not _same_parts(left, right):
                return False
            continue
        if len(left.args) != len(right.args) or left.kwargs.keys() != right.kwargs.keys():
            return False
        skipped = MODES.get(left.target, ())
        arguments = zip(left.args, right.args, strict=True)
        if not all(index in skipped or matching(*both) for index, both in enumerate(arguments)):
            return False
        if not all(matching(left.kwargs[name], right.kwargs[name]) for name in left.kwargs if name != "dropout_p"):
            return False
    return True


def _same_parts(left: fx.Node, right: fx.Node) -> bool:
    """Whether two attributes are graphs that agree, such as of what ``torch.no_grad()`` holds."""
    parts = [getattr(node.graph.owning_module, str(node.target), None) for node in (left, right)]
    if not all(isinstance(part, fx.GraphModule) for part in parts):
        return False
    mine, theirs = (part.graph for part in parts if isinstance(part, fx.GraphModule))
    return same_but_for_mode(mine, theirs)


def _nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target not in DROPS]


def _passed(node: fx.Node) -> fx.Node:
    while node.target in DROPS:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        node = before
    return node
