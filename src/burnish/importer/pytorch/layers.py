"""What the layers of a module do in training, read off its graph of ATen operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from burnish.errors import UnsupportedOperatorError

aten = torch.ops.aten


def _refuse_running_instances(node: fx.Node, buffers: Mapping[str, str]) -> None:
    if node.target == aten.instance_norm.default and isinstance(mean := node.args[3], fx.Node) and node.args[5]:
        layer = buffers.get(mean.name, "").rpartition(".")[0]
        raise UnsupportedOperatorError(
            f"the instance normalization '{layer}' keeps running statistics, which a training step moves for batch normalization "
            "alone: make it with track_running_stats=False, or put it into evaluation mode"
        )


@torch.library.custom_op("burnish_export::stop_gradient", mutates_args=())
def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """x, which the backward pass takes for a constant."""
    return x.clone()


@stop_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


IS_TRAINING, MOMENTUM = 5, 6
"""Where ``aten.batch_norm`` has its mode and its momentum."""


def neutralize(program: torch.export.ExportedProgram, module: torch.nn.Module, cumulative: Collection[str]) -> dict[str, str]:
    """Take the mode out of batch normalizations that have running statistics, in place; return their policies by layer.

    Args:
        program: the graph in training mode.
        module: what it was traced from.
        cumulative: the layers whose statistics are averages over all updates.

    Raises:
        UnsupportedOperatorError: an instance normalization moves running statistics.
    """
    buffers = program.graph_signature.inputs_to_buffers
    policies: dict[str, str] = {}
    for node in program.graph.nodes:
        _refuse_running_instances(node, buffers)
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


def stop_gradients(program: torch.export.ExportedProgram) -> None:
    """Let no gradient through ``detach()`` and out of ``torch.no_grad()``, in place: ONNX has no such operator."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.detach_.default):
            node.target, node.args = stop_gradient._opoverload, node.args[:1]
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            for output in list(node.users):
                if not isinstance(output.meta.get("val"), torch.Tensor) or not output.meta["val"].is_floating_point():
                    continue
                with graph.inserting_after(output):
                    stopped = graph.call_function(stop_gradient._opoverload, (output,))
                stopped.meta.update(output.meta)
                output.replace_all_uses_with(stopped, delete_user_cb=lambda user, stopped=stopped: user is not stopped)


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


def hold_rows(program: torch.export.ExportedProgram, canonical: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the rows of embeddings that get no gradient, ``padding_idx``: parameter -> rows.

    Where something else reads the table too, such as a tied head, the row trains by that: it is not held, and the embedding
    passes no gradient to it, which is written into the graph, in place.
    """
    parameters = program.graph_signature.inputs_to_parameters
    reads: dict[str, list[fx.Node]] = {}
    for placeholder in program.graph.find_nodes(op="placeholder"):
        if (name := parameters.get(placeholder.name)) is not None:
            reads.setdefault(canonical.get(name, name), []).extend(placeholder.users)
    held: dict[str, list[int]] = {}
    for name, readers in reads.items():
        padded = [node for node in readers if _padding(node) is not None]
        if padded and len(padded) == len(readers) and len({_padding(node) for node in padded}) == 1:
            held[name] = [_padding(padded[0]) or 0]
        else:
            for node in padded:
                _stop_padding(program.graph, node)
    return held


def _padding(node: fx.Node) -> int | None:
    """The row that an embedding passes no gradient to."""
    if node.target != aten.embedding.default or len(node.args) < 3:
        return None
    row: Any = node.args[2]
    return int(row) if row >= 0 else None


def _stop_padding(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        is_padding = graph.call_function(aten.eq.Scalar, (node.args[1], _padding(node)))
    with graph.inserting_after(is_padding):
        of_rows = graph.call_function(aten.unsqueeze.default, (is_padding, -1))
    with graph.inserting_after(of_rows):
        still = graph.call_function(stop_gradient._opoverload, (node,))
    with graph.inserting_after(still):
        rows = graph.call_function(aten.where.self, (of_rows, still, node))
    rows.meta.update(node.meta)
    node.replace_all_uses_with(rows, delete_user_cb=lambda user: user not in (still, rows))


def is_user_input(spec: Any) -> bool:
    return bool(spec.kind == InputKind.USER_INPUT)


def _submodule(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    return dict(module.named_modules()).get(name)
