"""Batch normalization over several workers: moments of each worker's part, an exchange of them, and what they come to.

With S1 = Σ dy and S2 = Σ dy (x - mean) over all workers and n their elements per channel, r the inverse deviation:
``dx = scale r (dy - S1 / n - (x - mean) r² S2 / n)``, ``dbias = S1``, ``dscale = r S2``. The sums that dx needs are the gradients
of scale and bias: these take no exchange of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, remove_node, replace_node
from burnish.norms import NormPolicy, Renorm, Sync, Train, get
from burnish.norms.training import BRANCH_METADATA, LAYER_METADATA, POLICY_METADATA
from burnish.operators import Operation
from burnish.operators.collectives import ALL_REDUCE, SHARD_COUNT, SHARD_MEAN, WORKER_RANK, all_gather, all_reduce
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING, BATCH_RENORM_TRAINING, correction
from burnish.operators.normalization.synchronized import (
    BATCH_NORM_APPLY,
    BATCH_NORM_GRAD_APPLY,
    BATCH_NORM_GRAD_MERGE,
    BATCH_NORM_GRAD_SUMS,
    BATCH_NORM_MERGE,
    BATCH_NORM_MOMENTS,
    Statistics,
    halves,
)
from burnish.operators.semantic import semantic_operator

DOUBLE = ir.DataType.DOUBLE
STATISTICS = ("mean", "rank0")
"""What running statistics may become where workers normalize by statistics of their own parts or groups."""
LAYERS = frozenset({BATCH_NORM_TRAINING, BATCH_RENORM_TRAINING})


def effective_policies(graph: ir.Graph, norm: NormPolicy, workers: int) -> dict[str, NormPolicy]:
    """Return what each policy of the graph's layers, as text, means for this many workers.

    Args:
        graph: with the policies in the metadata of its nodes.
        norm: what ``train`` means.
        workers: how many there are.

    Raises:
        ConfigurationError: the size of a group does not divide the number of workers, or a layer is in a branch, which some
            workers may take and others not.
    """
    for node in graph.all_nodes():
        if (layer := node.metadata_props.get(BRANCH_METADATA)) is not None:
            raise ConfigurationError(
                f"the batch normalization '{layer}' is in a branch, and workers cannot exchange its statistics there: freeze it, "
                f"norm={{'{layer}': 'frozen'}}, or train alone"
            )
    policies: dict[str, NormPolicy] = {}
    for node in graph:
        text = node.metadata_props.get(POLICY_METADATA)
        if text is None or text in policies:
            continue
        policy = get(text)
        meant = norm if isinstance(policy, Train) else policy
        check_group(meant, workers)
        policies[text] = meant
    return policies


def check_group(policy: NormPolicy, workers: int) -> None:
    """Raise ConfigurationError where a policy is of groups of workers, and their size does not divide the number of workers."""
    if isinstance(policy, Sync) and policy.group is not None and workers % policy.group:
        raise ConfigurationError(
            f"norm: '{policy}' takes statistics over groups of {policy.group} workers, and there are {workers}: give a size "
            f"that divides {workers}"
        )


def group_of(node: ir.Node, policies: Mapping[str, NormPolicy], workers: int) -> int | None:
    """Return how many workers a node's statistics are taken over: 0 for all; None where each has its own."""
    policy = policies[node.metadata_props[POLICY_METADATA]]
    if isinstance(policy, Renorm):
        return 0
    if not isinstance(policy, Sync):
        return None
    return 0 if policy.group in (None, workers) else policy.group


@dataclass(frozen=True)
class _Layer:
    """What the gradient of a synchronized layer reads of it.

    Attributes:
        scale, pivot: [C], of the layer's dtype.
        statistics: what it normalizes by.
    """

    scale: Tensor
    pivot: Tensor
    statistics: Statistics


def synchronize(graph: ir.Graph, policies: Mapping[str, NormPolicy], workers: int, spare: bool = True) -> list[Tensor]:
    """Rewrite, in place, every layer that normalizes by statistics of several workers, and its gradient.

    ``spare`` lets scale and bias have the gradients of the whole batch at once, without an exchange of their own.

    Returns:
        How many elements the whole batch has in each layer that takes its statistics, float64 [1].
    """
    counts = []
    for node in [node for node in graph if semantic_operator(node) in LAYERS]:
        if POLICY_METADATA not in node.metadata_props:
            continue  # groups of samples within a worker's part
        group = group_of(node, policies, workers)
        if group is not None:
            count = _synchronize_layer(graph, node, group, workers, spare)
            counts += [count] if group == 0 else []
    return counts


def _synchronize_layer(graph: ir.Graph, node: ir.Node, group: int, workers: int, spare: bool) -> Tensor:
    """Rewrite a layer; returns the number of elements of its statistics."""
    builder = Builder(graph, before=node)
    op = Operation(node, builder)
    x, scale, bias = (op.required(index) for index in range(3))
    moments, pivot = BATCH_NORM_MOMENTS.emit(x)
    gathered = all_gather(moments, workers, "moments", group)
    statistics = Statistics(*BATCH_NORM_MERGE.emit(gathered, scale, epsilon=op.attribute("epsilon")))
    gain = statistics.gain
    if BATCH_RENORM_TRAINING.is_of(node):
        r, d = correction(op, statistics.mean, statistics.inverse_std)
        gain, bias = gain * r, bias + scale * d
    y = BATCH_NORM_APPLY(x, pivot, statistics.center, gain, bias)
    layer = _Layer(scale, pivot, statistics)
    for user in dict.fromkeys(user for value in node.outputs[4:6] for user, _ in value.uses()):
        if not BATCH_NORM_GRAD.is_of(user):
            raise ConfigurationError(
                f"norm: the statistics of batch normalization '{node.metadata_props[LAYER_METADATA]}' are read by {user.op_type} "
                f"'{user.name}', which cannot be synchronized: freeze the layer, norm={{...: 'frozen'}}, or train with one worker"
            )
        _synchronize_gradient(graph, user, layer, group, spare)
    for user, _ in list(node.outputs[1].uses()):
        if SHARD_COUNT.is_of(user):
            number = builder.op("Reshape", statistics.count, builder.integers([]), shape=[])
            user.outputs[0].replace_all_uses_with(builder.cast(number, user.outputs[0].dtype or scale.dtype).value)
            remove_node(user)
    replace_node(node, (y, statistics.mean, statistics.inverse_std, statistics.variance, None, None))
    return statistics.count


def _synchronize_gradient(graph: ir.Graph, node: ir.Node, layer: _Layer, group: int, spare: bool) -> None:
    builder = Builder(graph, before=node)
    dy, x, scale = (builder.tensor(value) for value in node.inputs[:3] if value is not None)
    merged = layer.statistics
    pivot, count, center, precise, gain = (
        builder.tensor(tensor.value) for tensor in (layer.pivot, merged.count, merged.center, merged.precise, merged.gain)
    )
    if scale.value is not layer.scale.value:
        gain = builder.cast(builder.cast(scale, DOUBLE) * precise, scale.dtype)
    sums = BATCH_NORM_GRAD_SUMS(dy, x, pivot, center)
    (total,) = all_reduce((sums,), "sums", group)
    slope, offset, *whole = BATCH_NORM_GRAD_MERGE.emit(total, count, precise, scale)
    dx = BATCH_NORM_GRAD_APPLY(dy, x, pivot, center, gain, slope, offset)
    own_flow, own_products = halves(sums, scale)
    own = (builder.cast(own_products * precise, scale.dtype), builder.cast(own_flow, scale.dtype))
    if group == 0 and spare:
        # The sums over all workers are there already.
        for output, gradient in zip(node.outputs[1:], whole, strict=True):
            _spare_exchange(output, gradient)
    replace_node(node, (dx, *own))


def _spare_exchange(own: ir.Value, whole: Tensor) -> None:
    """Let the sum over all workers stand where this worker's part was to be exchanged, and is read by nothing else."""
    users = list(own.uses())
    if len(users) != 1 or not ALL_REDUCE.is_of(users[0][0]) or len(users[0][0].inputs) != 1:
        return
    replace_node(users[0][0], whole)


def groups_of_statistics(
    graph: ir.Graph, policies: Mapping[str, NormPolicy], workers: int, updates: Mapping[str, str]
) -> dict[str, int]:
    """Return, for each running statistic, how many workers, from rank 0 on, have the statistics of a batch that rank 0 has.

    Args:
        graph: a training graph, with the marks of its statistics.
        policies: what each policy means.
        workers: how many there are.
        updates: by the name of an output that is the next value of a running statistic, the input that is its present one.

    Raises:
        ConfigurationError: something else is computed of running statistics of this step: its gradient would be that of averages.
    """
    groups: dict[str, int] = {}
    for node in [node for node in graph if SHARD_MEAN.is_of(node)]:
        found, pending = set(node.outputs), list(node.outputs)
        while pending:
            value = pending.pop()
            name = value.name or ""
            if value.is_graph_output() and name in updates:
                # Layers that share it may differ: it changes in a step in which all of them have statistics.
                groups[name] = min(groups.get(name, workers), _givers(node, policies, workers))
            elif value.is_graph_output():
                raise ConfigurationError(
                    f"DataParallel: statistics='rank0': the running statistics of '{node.metadata_props[LAYER_METADATA]}' are "
                    f"read in the step that updates them, for '{name}': take statistics='mean'"
                )
            following = {output for user, _ in value.uses() for output in user.outputs} - found
            found |= following
            pending += following
    return groups


def _givers(node: ir.Node, policies: Mapping[str, NormPolicy], workers: int) -> int:
    """How many workers, from rank 0 on, have the statistics that rank 0 has."""
    group = group_of(node, policies, workers)
    return 1 if group is None else group or workers


def join_statistics(
    graph: ir.Graph, policies: Mapping[str, NormPolicy], workers: int, *, of_rank0: bool = False
) -> dict[int, Tensor]:
    """Put, in place, what running statistics take in of a batch where workers have statistics of their own parts.

    Args:
        graph: a training graph.
        policies: what each policy means.
        workers: how many there are.
        of_rank0: take those of rank 0, which a group of rank 0 has in common, so that they are there too if its part is empty;
            else the average over the workers, weighted by elements.

    Returns:
        By how many workers give theirs, from rank 0 on: a number that is 0 if all of their parts are empty, float64 [1].
    """
    counts: dict[int, Tensor] = {}
    rank = WORKER_RANK(builder=Builder(graph, before=next(iter(graph)))) if of_rank0 else None
    for node in [node for node in graph if SHARD_MEAN.is_of(node) or SHARD_COUNT.is_of(node)]:
        builder = Builder(graph, before=node)
        if SHARD_COUNT.is_of(node):
            assert node.inputs[0] is not None
            replace_node(node, builder.tensor(node.inputs[0]))
            continue
        mean, variance, weight = (builder.tensor(value) for value in node.inputs if value is not None)
        if group_of(node, policies, workers) == 0:
            replace_node(node, (mean, variance))
            continue
        given: tuple[Tensor, ...] = (builder.cast(mean, DOUBLE), builder.cast(variance, DOUBLE))
        givers = workers
        if rank is None:
            share = builder.cast(weight, DOUBLE)
            number = builder.op("Reshape", share, builder.integers([1]), shape=[1])
            given = (given[0] * share, given[1] * share, number)
        else:
            givers = _givers(node, policies, workers)
            gives = builder.op("Less", builder.tensor(rank.value), builder.scalar(givers, ir.DataType.INT64), shape=[])
            one, zero = builder.cast(builder.integers([1]), DOUBLE), builder.scalar(0.0, DOUBLE)
            # A product with 0 would let through what is not finite on another worker.
            given = tuple(builder.op("Where", gives, tensor, zero, like=tensor) for tensor in (*given, one))
        means, variances, total = all_reduce(given, "average")
        counts.setdefault(givers, total)
        total = builder.op("Max", total, 1.0)
        replace_node(node, (builder.cast(means / total, mean.dtype), builder.cast(variances / total, variance.dtype)))
    return counts


def keep_statistics(graph: ir.Graph, counts: Mapping[str, Tensor], updates: Mapping[str, str]) -> None:
    """Let running statistics stay, in place, what they are in a step in which there are no samples for them.

    Args:
        graph: a training graph.
        counts: by the name of an output that is the next value of a running statistic, a number [1] that is 0 in such a step.
        updates: for each of them the input that is its present value.
    """
    builder = Builder(graph)
    present = {value.name: value for value in graph.inputs}
    has_samples: dict[ir.Value, Tensor] = {}
    for index, output in enumerate(graph.outputs):
        name = output.name or ""
        if name in counts:
            count = counts[name].value
            if count not in has_samples:
                has_samples[count] = builder.op("Greater", builder.tensor(count), 0.0, shape=[1])
            before, following = builder.tensor(present[updates[name]]), builder.tensor(output)
            kept = builder.op("Where", has_samples[count], following, before, like=before)
            graph.outputs[index] = kept.value
            output.name, kept.value.name = None, name
