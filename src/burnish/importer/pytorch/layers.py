"""Rewrites of a module's ATen graph: normalization, dropout and gradients in training; comparison with evaluation."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
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
    """Return x as a constant for the backward pass."""
    return x.clone()


@stop_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_OF_NUMBERS = {
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.scalar_tensor.default,
    aten.rand.default,
    aten.randn.default,
}
_SUMS = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor})

IS_TRAINING, MOMENTUM = 5, 6
"""Argument indices of the mode and momentum of ``aten.batch_norm``."""


def count_training_uses(program: torch.export.ExportedProgram) -> Counter[str]:
    """Return, by layer, the number of normalizations with batch statistics per call, each of which counts one batch."""
    uses: Counter[str] = Counter()
    for graph, buffers in _graphs(program.graph, program.graph_signature.inputs_to_buffers):
        for node in graph.nodes:
            if node.target == aten.batch_norm.default and node.args[3] is not None and node.args[IS_TRAINING]:
                uses[buffers.get(node.args[3].name, "").rpartition(".")[0]] += 1
    return uses


def neutralize(program: torch.export.ExportedProgram, module: torch.nn.Module, cumulative: Collection[str]) -> dict[str, str]:
    """Remove the mode from batch normalizations with running statistics, in place; return their policies by layer.

    Args:
        program: the graph in training mode.
        module: the traced module.
        cumulative: layers that average their statistics over all updates.

    Raises:
        UnsupportedOperatorError: an instance normalization updates running statistics.
    """
    policies: dict[str, str] = {}
    for graph, buffers in _graphs(program.graph, program.graph_signature.inputs_to_buffers):
        for node in graph.nodes:
            _refuse_running_instances(node, buffers)
            if node.target != aten.batch_norm.default or (mean := node.args[3]) is None:
                continue
            layer = buffers.get(mean.name, "").rpartition(".")[0]
            is_training, momentum = node.args[IS_TRAINING], node.args[MOMENTUM]
            node.args = (*node.args[:IS_TRAINING], False, *node.args[MOMENTUM:])
            if not is_training:
                policies[layer] = "frozen"
                continue
            if mean.name not in buffers:
                raise UnsupportedOperatorError(
                    f"batch normalization in training writes its running statistics to '{mean.name}', which is no buffer of the "
                    "module: hold them in one (torch.nn.BatchNorm2d does), or normalize without them (running_mean=None)"
                )
            name = "sync" if isinstance(_submodule(module, layer), torch.nn.SyncBatchNorm) else "train"
            retained = "cumulative" if layer in cumulative else repr(1.0 - momentum)
            policies[layer] = f"{name}:momentum={retained}"
    return policies


def _graphs(graph: fx.Graph, buffers: Mapping[str, str]) -> Iterator[tuple[fx.Graph, Mapping[str, str]]]:
    yield graph, buffers
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            part = _held(node)
            operands = zip(part.graph.find_nodes(op="placeholder"), node.args[2:], strict=True)
            inner = {inside.name: buffers[read.name] for inside, read in operands if getattr(read, "name", None) in buffers}
            yield from _graphs(part.graph, inner)
            part.recompile()


def _held(node: fx.Node) -> fx.GraphModule:
    part = getattr(node.graph.owning_module, str(node.args[1].target))  # type: ignore[union-attr]
    assert isinstance(part, fx.GraphModule)
    return part


def stop_gradients(program: torch.export.ExportedProgram) -> None:
    """Stop gradients at ``detach()`` and ``torch.no_grad()``, in place: ONNX has no such operator."""
    graph = program.graph
    buffers = {node for node in graph.find_nodes(op="placeholder") if node.name in program.graph_signature.inputs_to_buffers}
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.detach_.default):
            if _viewed(node) in buffers:
                continue  # it has no gradient, and writes to the view must reach the buffer
            node.target, node.args = stop_gradient._opoverload, node.args[:1]
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            _stop_operands(node, buffers)
            for output in list(node.users):
                if not isinstance(output.meta.get("val"), torch.Tensor) or not output.meta["val"].is_floating_point():
                    continue
                with graph.inserting_after(output):
                    stopped = graph.call_function(stop_gradient._opoverload, (output,))
                stopped.meta.update(output.meta)
                output.replace_all_uses_with(stopped, delete_user_cb=lambda user, stopped=stopped: user is not stopped)


def _stop_operands(node: fx.Node, buffers: Collection[fx.Node]) -> None:
    """Make the operands of ``torch.no_grad()`` constants, in place, except buffers that it writes and others read later."""
    part = _held(node)
    written = {_viewed(inner.args[0]) for inner in part.graph.nodes if _writes(inner) and isinstance(inner.args[0], fx.Node)}
    written |= {_viewed(out) for inner in part.graph.nodes if isinstance(out := inner.kwargs.get("out"), fx.Node)}
    operands = list(node.args)
    for index, placeholder in enumerate(part.graph.find_nodes(op="placeholder"), start=2):
        operand = operands[index]
        if placeholder in written or not isinstance(operand, fx.Node) or _viewed(operand) in buffers:
            continue
        value = operand.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with node.graph.inserting_before(node):
                stopped = node.graph.call_function(stop_gradient._opoverload, (operand,))
            stopped.meta.update(operand.meta)
            operands[index] = stopped
    node.args = tuple(operands)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and bool(node.args)


def _viewed(node: fx.Node) -> fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.args and isinstance(source := node.args[0], fx.Node):
        alias = node.target._schema.arguments[0].alias_info
        if alias is None:
            break
        node = source
    return node


def write_out_channel_dropout(program: torch.export.ExportedProgram) -> None:
    """Rewrite dropout of whole channels as dropout of ones per sample and channel, in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target not in (aten.feature_dropout.default, aten.feature_dropout_.default) or not node.args[2]:
            continue
        x, ratio, _ = node.args
        with graph.inserting_before(node):
            ones = graph.call_function(aten.ones_like.default, (_first_places(graph, x),))
            mask = graph.call_function(aten.dropout.default, (ones, ratio, True))
            dropped = graph.call_function(aten.mul.Tensor, (x, mask))
        dropped.meta.update(node.meta)
        node.replace_all_uses_with(dropped)
        graph.erase_node(node)


def keep_drawing(training: torch.export.ExportedProgram, evaluation: torch.export.ExportedProgram) -> None:
    """Write out dropout that is active in evaluation too, in place: ONNX's operator is removed in evaluation.

    Raises:
        UnsupportedOperatorError: attention with dropout in evaluation has fewer keys than queries (``enable_gqa``).
    """
    for operators, is_on in ((_DROPOUT, _drops), (frozenset({_ATTENTION}), _drops_attention)):
        pairs = [[node for node in program.graph.nodes if node.target in operators] for program in (training, evaluation)]
        is_paired = len(pairs[0]) == len(pairs[1])
        for index, node in enumerate(pairs[1]):
            if is_on(node):
                for other in [node, *([pairs[0][index]] if is_paired else [])]:
                    _draw_always(other)


_ATTENTION = aten.scaled_dot_product_attention.default

_CHANNELS = (aten.feature_dropout.default, aten.feature_dropout_.default)

_DROPOUT = frozenset({aten.dropout.default, aten.dropout_.default, *_CHANNELS})


def _drops(node: fx.Node) -> bool:
    return bool(node.args[2]) and bool(node.args[1] != 0)


def _drops_attention(node: fx.Node) -> bool:
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def _draw_always(node: fx.Node) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        if node.target == _ATTENTION:
            query, key, value, *rest = node.args
            mask, ratio, is_causal = [*rest, None, 0.0, False][: len(rest)] + [None, 0.0, False][len(rest) :]
            options = {"attn_mask": mask, "dropout_p": ratio, "is_causal": is_causal} | dict(node.kwargs)
            shares = _attention_shares(graph, query, key, options)
            result = graph.call_function(aten.matmul.default, (_drawn(graph, shares, shares, options["dropout_p"]), value))
        else:
            x, ratio, _ = node.args
            result = _drawn(graph, x, _first_places(graph, x) if node.target in _CHANNELS else x, ratio)
    result.meta.update(node.meta)
    if node.target in (aten.dropout_.default, aten.feature_dropout_.default):
        with graph.inserting_before(node):
            result = graph.call_function(aten.copy_.default, (node.args[0], result))
        result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _drawn(graph: fx.Graph, x: Any, like: Any, ratio: Any) -> fx.Node:
    """Return x with random values zeroed and others scaled, with one number drawn per value of ``like``."""
    drawn = graph.call_function(aten.rand_like.default, (like,))
    kept = graph.call_function(aten.where.ScalarOther, (graph.call_function(aten.ge.Scalar, (drawn, ratio)), x, 0.0))
    return graph.call_function(aten.mul.Tensor, (kept, 1.0 / (1.0 - ratio) if ratio < 1 else 0.0))


def _attention_shares(graph: fx.Graph, query: Any, key: Any, options: Mapping[str, Any]) -> fx.Node:
    if options.get("enable_gqa"):
        raise UnsupportedOperatorError(
            "scaled_dot_product_attention has dropout_p in evaluation too, and enable_gqa: give it dropout_p=0 there "
            "(dropout_p if self.training else 0.0), or repeat the keys"
        )
    scale = options.get("scale")
    width = query.meta["val"].shape[-1]
    scaled = graph.call_function(aten.mul.Tensor, (query, 1.0 / math.sqrt(width) if scale is None else scale))
    scores = graph.call_function(aten.matmul.default, (scaled, graph.call_function(aten.transpose.int, (key, -2, -1))))
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        ones = graph.call_function(aten.ones_like.default, (scores,), {"dtype": torch.bool})
        mask, is_boolean = graph.call_function(aten.tril.default, (ones,)), True
    else:
        is_boolean = mask is not None and mask.meta["val"].dtype == torch.bool
    if mask is not None and is_boolean:
        scores = graph.call_function(aten.where.ScalarOther, (mask, scores, -math.inf))
    elif mask is not None:
        scores = graph.call_function(aten.add.Tensor, (scores, mask))
    return graph.call_function(aten.softmax.int, (scores, -1))


def _first_places(graph: fx.Graph, x: Any) -> Any:
    for axis in range(2, x.meta["val"].dim()):
        x = graph.call_function(aten.slice.Tensor, (x, axis, 0, 1))
    return x


_PARTS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("chunk", "unsafe_chunk", "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "tensor_split")
    for overload in getattr(aten, name).overloads()
)


_EQUAL_PARTS = frozenset(
    {aten.chunk.default, aten.unsafe_chunk.default, aten.split.Tensor, aten.unsafe_split.Tensor},
)


def take_parts(program: torch.export.ExportedProgram) -> None:
    """Replace splits along an open axis by slices, and a single part by the whole, in place: the exporter makes lists of them."""
    for node in list(program.graph.nodes):
        if node.target not in _PARTS:
            continue
        parts: list[Any] = [node.args[0]] if len(node.meta["val"]) == 1 else _slices(node)
        for user in list(node.users):
            if parts and user.target is operator.getitem:
                user.replace_all_uses_with(parts[user.args[1]])
                program.graph.erase_node(user)


def _slices(node: fx.Node) -> list[fx.Node]:
    given: Any = node.args
    whole, count, axis = (*given, node.kwargs.get("dim", 0))[:3]
    extent = whole.meta["val"].shape[axis]
    if node.target not in _EQUAL_PARTS or not isinstance(extent, torch.SymInt):
        return []
    graph, number = node.graph, len(node.meta["val"])
    with graph.inserting_before(node):

        def computed(function: Any, *args: Any) -> fx.Node:
            made = graph.call_function(function, args)
            made.meta["val"] = function(*[arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args])
            return made

        size: Any = count
        if node.target in (aten.chunk.default, aten.unsafe_chunk.default):
            size = computed(operator.floordiv, computed(operator.add, computed(aten.sym_size.int, whole, axis), count - 1), count)
        is_known = isinstance(size, int)
        between = [size * index if is_known else computed(operator.mul, size, index) for index in range(1, number)]
        places = [0, *between, sys.maxsize]
        parts = [graph.call_function(aten.slice.Tensor, (whole, axis, start, end)) for start, end in itertools.pairwise(places)]
    for part, value in zip(parts, node.meta["val"], strict=True):
        part.meta.update(node.meta, val=value)
    return parts


def say_dtypes(program: torch.export.ExportedProgram) -> None:
    """Set explicit dtypes for tensors made from numbers, in place: the exporter does not know PyTorch's default dtype."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in _OF_NUMBERS and node.kwargs.get("dtype") is None:
                    node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
            part.recompile()


def write_out_factors(program: torch.export.ExportedProgram) -> None:
    """Write out the factors of sums, in place: the exporter rounds that of ``x.add(y, alpha=0.1)`` to float32."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                if node.target in _SUMS and node.kwargs.get("alpha", 1) != 1:
                    summand, factor = node.args[1], node.kwargs["alpha"]
                    if isinstance(summand, fx.Node):
                        is_tensor = isinstance(summand.meta["val"], torch.Tensor)
                        with part.graph.inserting_before(node):
                            scaled = part.graph.call_function(aten.mul.Tensor if is_tensor else operator.mul, (summand, factor))
                        scaled.meta.update(summand.meta, val=summand.meta["val"] * factor)
                        summand = scaled
                    else:
                        summand = summand * factor
                    node.args = (node.args[0], summand)
                    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}
            part.recompile()


def loosen_views(program: torch.export.ExportedProgram) -> None:
    """Turn views into reshapes, in place: written-out attention has another memory layout than its kernel."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target == aten.view.default:
            node.target = aten.reshape.default
        elif node.target == aten.scaled_dot_product_attention.default:
            with graph.inserting_after(node):
                plain = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            plain.meta.update(node.meta)
            node.replace_all_uses_with(plain, delete_user_cb=lambda user, plain=plain: user is not plain)


def keep_scales(program: torch.export.ExportedProgram) -> None:
    """Keep all digits of attention's scale in float64, in place: the exporter uses float32."""
    for node in program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        query, scale = node.args[0], node.kwargs.get("scale")
        example = query.meta["val"]
        if not isinstance(scale, float) or example.dtype != torch.float64 or scale == float(np.float32(scale)):
            continue
        extra = scale * math.sqrt(example.shape[-1])
        if not math.isclose(extra, 1.0, rel_tol=1e-15):
            with program.graph.inserting_before(node):
                scaled = program.graph.call_function(aten.mul.Tensor, (query, extra))
            scaled.meta.update(query.meta)
            node.args = (scaled, *node.args[1:])
        node.kwargs = {name: argument for name, argument in node.kwargs.items() if name != "scale"}


def hold_rows(program: torch.export.ExportedProgram, canonical: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the embedding rows without a gradient, ``padding_idx``: parameter -> rows.

    If the table has other readers, such as a tied head, these train the row, so it is not held; instead the graph stops the
    embedding's gradient to it, in place. The same applies to computed tables.
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
    handled = {node for readers in reads.values() for node in readers}
    for node in program.graph.find_nodes(op="call_function", target=aten.embedding.default):
        if _padding(node) is not None:
            if node not in handled:
                _stop_padding(program.graph, node)
            node.args = (*node.args[:2], -1, *node.args[3:])
    return held


def _padding(node: fx.Node) -> int | None:
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


def in_layer(layer: str, name: str) -> str:
    """Return the name of a tensor of a layer; the module itself has an empty name."""
    return f"{layer}.{name}" if layer else name


def is_user_input(spec: Any) -> bool:
    return bool(spec.kind == InputKind.USER_INPUT)


def _submodule(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    return dict(module.named_modules()).get(name)


DROPS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("dropout", "dropout_", "feature_dropout", "feature_dropout_")
    for overload in ("default",)
)
"""Operators that become ONNX's Dropout, which evaluation removes."""

MODES: Mapping[Any, tuple[int, ...]] = {
    aten.batch_norm.default: (5, 6),
    aten.lstm.input: (6,),
    aten.gru.input: (6,),
    aten.rnn_tanh.input: (6,),
    aten.rnn_relu.input: (6,),
    aten.scaled_dot_product_attention.default: (4,),
}
"""Arguments that only depend on the mode of normalization and dropout."""


def same_but_for_mode(training: fx.Graph, evaluation: fx.Graph) -> bool:
    """True if two graphs of one module are equal except for normalization and dropout.

    Args:
        training: graph in training mode, with neutralized batch normalization.
        evaluation: graph in evaluation mode.
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
