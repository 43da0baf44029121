"""What the layers of a module do in training, read off its graph of ATen operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind

aten = torch.ops.aten

IS_TRAINING, MOMENTUM = 5, 6
"""Where ``aten.batch_norm`` has its mode and its momentum."""


def neutralize(program: torch.export.ExportedProgram, module: torch.nn.Module, cumulative: Collection[str]) -> dict[str, str]:
    """Take the mode out of batch normalizations that have running statistics, in place; return their policies by layer.

    Args:
        program: the graph in training mode.
        module: what it was traced from.
        cumulative: the layers whose statistics are averages over all updates.
    """
    buffers = program.graph_signature.inputs_to_buffers
    policies: dict[str, str] = {}
    for node in program.graph.nodes:
        if node.target != aten.batch_norm.default or (mean := node.args[3]) is None:
            continue
        layer = buffers.get(mean.name, "").rpartition(".")[0]
        is_training, momentum = node.args[IS_TRAINING], node.args[MOMENTUM]
        node.args = (*node.args[:IS_TRAINING], False, *node.args[MOMENTUM:])
        if not is_training:
            policies[layer] = "frozen"
            continue
        name = "sync" if isinstance(_submodule(module, layer), torch.nn.SyncBatchNorm) else "train"
        retained = "cumulative" if layer in cumulative else repr(1.0 - momentum)
        policies[layer] = f"{name}:momentum={retained}"
    return policies


def write_out_channel_dropout(program: torch.export.ExportedProgram) -> None:
    """Write dropout of whole channels with dropout of ones, one for each sample and channel, in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target not in (aten.feature_dropout.default, aten.feature_dropout_.default) or not node.args[2]:
            continue
        x, ratio, _ = node.args
        with graph.inserting_before(node):
            first = x
            for axis in range(2, x.meta["val"].dim()):
                first = graph.call_function(aten.slice.Tensor, (first, axis, 0, 1))
            ones = graph.call_function(aten.ones_like.default, (first,))
            mask = graph.call_function(aten.dropout.default, (ones, ratio, True))
            dropped = graph.call_function(aten.mul.Tensor, (x, mask))
        dropped.meta.update(node.meta)
        node.replace_all_uses_with(dropped)
        graph.erase_node(node)


def loosen_views(program: torch.export.ExportedProgram) -> None:
    """Let views be reshapes, in place: attention that is written out gives its elements in another layout than its kernel."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target == aten.view.default:
            node.target = aten.reshape.default
        elif node.target == aten.scaled_dot_product_attention.default:
            with graph.inserting_after(node):
                plain = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            plain.meta.update(node.meta)
            node.replace_all_uses_with(plain, delete_user_cb=lambda user, plain=plain: user is not plain)


def held_rows(program: torch.export.ExportedProgram, canonical: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the rows of embeddings that get no gradient, ``padding_idx``: parameter -> rows."""
    parameters = program.graph_signature.inputs_to_parameters
    rows: dict[str, set[int]] = {}
    for node in program.graph.nodes:
        if node.target == aten.embedding.default and len(node.args) > 2 and node.args[2] >= 0:
            weight: Any = node.args[0]
            if (name := parameters.get(weight.name)) is not None:
                rows.setdefault(canonical.get(name, name), set()).add(node.args[2])
    return {name: sorted(numbers) for name, numbers in rows.items()}


def is_user_input(spec: Any) -> bool:
    return bool(spec.kind == InputKind.USER_INPUT)


def _submodule(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    return dict(module.named_modules()).get(name)
