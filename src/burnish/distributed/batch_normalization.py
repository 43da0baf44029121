"""Synchronized batch normalization: workers exchange the moments of their parts of the batch, and the sums of its gradient.

With S1 = Σ dy and S2 = Σ dy (x - mean) over all workers, n their elements per channel, and r the inverse deviation: ``dx = scale
r (dy - S1 / n - (x - mean) r² S2 / n)``, ``dbias = S1``, ``dscale = r S2``. The gradients of scale and bias therefore need no
separate exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, remove_node, replace_node
from burnish.graph.annotations import BRANCH_LAYER, LAYER, POLICY
from burnish.norms import NormPolicy, Renorm, Sync, Train, get
from burnish.operators import Operation
from burnish.operators.collectives import ALL_REDUCE, SHARD_COUNT, SHARD_MEAN, WORKER_RANK, all_gather, all_reduce
from burnish.operators.normalization import synchronized
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING, BATCH_RENORM_TRAINING, correction
from burnish.operators.semantic import semantic_operator

DOUBLE = ir.DataType.DOUBLE
STATISTICS = ("mean", "rank0")
"""Ways to agree on running statistics if the workers normalize by different ones."""
LAYERS = frozenset({BATCH_NORM_TRAINING, BATCH_RENORM_TRAINING})


def effective_policies(graph: ir.Graph, norm: NormPolicy, workers: int) -> dict[str, NormPolicy]:
    for node in graph.all_nodes():
        if (layer := BRANCH_LAYER.get(node)) is not None:
            raise ConfigurationError(
                f"the batch normalization '{layer}' is in a branch, and workers cannot exchange its statistics there: freeze it, "
                f"norm={{'{layer}': 'frozen'}}, or train alone"
            )
    policies: dict[str, NormPolicy] = {}
    for node in graph:
        text = POLICY.get(node)
        if text is not None and text not in policies:
            policies[text] = norm if isinstance(get(text), Train) else get(text)
            check_group(policies[text], workers)
    return policies


def check_group(policy: NormPolicy, workers: int) -> None:
    if isinstance(policy, Sync) and policy.group is not None and workers % policy.group:
        raise ConfigurationError(
            f"norm: '{policy}' takes statistics over groups of {policy.group} workers, and there are {workers}: give a size "
            f"that divides {workers}"
        )


def synchronize(
    graph: ir.Graph, norm: NormPolicy, workers: int, updates: Mapping[str, str], *, of_rank0: bool = False, spare: bool = True
) -> bool:
    """Rewrite, in place, layers with statistics of several workers, their gradients, and running statistics.

    ``updates`` maps a running statistic's output to its input. With ``of_rank0`` the statistic is rank 0's, otherwise the average
    by elements. ``spare`` gives scale and bias the whole batch's gradients without a separate exchange.
    """
    made = _Synchronization(graph, effective_policies(graph, norm, workers), workers, spare)
    groups = dict.fromkeys(updates, workers) | (made.groups_of_statistics(updates) if of_rank0 else {})
    whole = made.synchronize_layers()
    counts = made.join_statistics(of_rank0) | whole
    builder, present = Builder(graph), {value.name: value for value in graph.inputs}
    has_samples: dict[int, Tensor] = {}
    for index, output in enumerate(graph.outputs):
        name = output.name or ""
        if workers == 1 or (group := groups.get(name)) not in counts:
            continue
        # In a step without samples (count 0), a running statistic does not change.
        if group not in has_samples:
            has_samples[group] = builder.op("Greater", builder.tensor(counts[group].value), 0.0, shape=[1])
        before, following = builder.tensor(present[updates[name]]), builder.tensor(output)
        kept = builder.op("Where", has_samples[group], following, before, like=before)
        graph.outputs[index] = kept.value
        output.name, kept.value.name = None, name
    return bool(counts)


@dataclass(frozen=True)
class _Synchronization:
    graph: ir.Graph
    policies: Mapping[str, NormPolicy]
    workers: int
    spare: bool

    def _group_of(self, node: ir.Node) -> int | None:
        """Return the number of workers that share a node's statistics; 0 for all, None if each has its own."""
        policy = self.policies[POLICY.get(node) or ""]
        if isinstance(policy, Renorm):
            return 0
        if not isinstance(policy, Sync):
            return None
        return 0 if policy.group in (None, self.workers) else policy.group

    def _givers(self, node: ir.Node) -> int:
        group = self._group_of(node)
        return 1 if group is None else group or self.workers

    def synchronize_layers(self) -> dict[int, Tensor]:
        """Rewrite layers; return the whole batch's number of elements, float64 [1], by the number of workers."""
        counts: dict[int, Tensor] = {}
        for node in [node for node in self.graph if semantic_operator(node) in LAYERS]:
            # A layer without a policy normalizes groups of samples within a worker's part.
            group = self._group_of(node) if POLICY.is_on(node) else None
            if group is not None:
                count = self._synchronize_layer(node, group)
                if group == 0:
                    counts.setdefault(self.workers, count)
        return counts

    def _synchronize_layer(self, node: ir.Node, group: int) -> Tensor:
        builder = Builder(self.graph, before=node)
        op = Operation(node, builder)
        x, scale, bias = (op.required(index) for index in range(3))
        moments, pivot = synchronized.BATCH_NORM_MOMENTS.emit(x)
        gathered = all_gather(moments, self.workers, "moments", group)
        statistics = synchronized.Statistics(
            *synchronized.BATCH_NORM_MERGE.emit(gathered, scale, epsilon=op.attribute("epsilon"))
        )
        gain = statistics.gain
        if BATCH_RENORM_TRAINING.is_of(node):
            r, d = correction(op, statistics.mean, statistics.inverse_std)
            gain, bias = gain * r, bias + scale * d
        y = synchronized.BATCH_NORM_APPLY(x, pivot, statistics.center, gain, bias)
        for user in dict.fromkeys(user for value in node.outputs[4:6] for user, _ in value.uses()):
            if not BATCH_NORM_GRAD.is_of(user):
                raise ConfigurationError(
                    f"norm: the statistics of batch normalization '{LAYER.get(node)}' are read by "
                    f"{user.op_type} '{user.name}', which cannot be synchronized: freeze the layer, norm={{...: 'frozen'}}, or "
                    "train with one worker"
                )
            self._synchronize_gradient(user, group, scale, pivot, statistics)
        for user, _ in list(node.outputs[1].uses()):
            if SHARD_COUNT.is_of(user):
                number = builder.op("Reshape", statistics.count, builder.integers([]), shape=[])
                user.outputs[0].replace_all_uses_with(builder.cast(number, user.outputs[0].dtype or scale.dtype).value)
                remove_node(user)
        replace_node(node, (y, statistics.mean, statistics.inverse_std, statistics.variance, None, None))
        return statistics.count

    def _synchronize_gradient(
        self, node: ir.Node, group: int, own_scale: Tensor, pivot: Tensor, merged: synchronized.Statistics
    ) -> None:
        builder = Builder(self.graph, before=node)
        dy, x, scale, pivot, count, center, precise, gain = builder.tensors(
            [*node.inputs[:3], *(each.value for each in (pivot, merged.count, merged.center, merged.precise, merged.gain))]
        )
        if scale.value is not own_scale.value:
            gain = builder.cast(builder.cast(scale, DOUBLE) * precise, scale.dtype)
        sums = synchronized.BATCH_NORM_GRAD_SUMS(dy, x, pivot, center)
        (total,) = all_reduce((sums,), "sums", group)
        slope, offset, *whole = synchronized.BATCH_NORM_GRAD_MERGE.emit(total, count, precise, scale)
        dx = synchronized.BATCH_NORM_GRAD_APPLY(dy, x, pivot, center, gain, slope, offset)
        own_flow, own_products = synchronized.halves(sums, scale)
        own = (builder.cast(own_products * precise, scale.dtype), builder.cast(own_flow, scale.dtype))
        for output, gradient in zip(node.outputs[1:], whole, strict=True) if group == 0 and self.spare else ():
            # The sum over all workers already exists, so an exchange that only reads this worker's part is not needed.
            users = list(output.uses())
            if len(users) == 1 and ALL_REDUCE.is_of(users[0][0]) and len(users[0][0].inputs) == 1:
                replace_node(users[0][0], gradient)
        replace_node(node, (dx, *own))

    def groups_of_statistics(self, updates: Mapping[str, str]) -> dict[str, int]:
        """Return, for each running statistic, how many workers, from rank 0 on, share rank 0's statistics."""
        groups: dict[str, int] = {}
        for node in [node for node in self.graph if SHARD_MEAN.is_of(node)]:
            found, pending = set(node.outputs), list(node.outputs)
            while pending:
                value = pending.pop()
                name = value.name or ""
                if value.is_graph_output() and name in updates:
                    # Layers that share it may differ: it changes only in steps with statistics for all of them.
                    groups[name] = min(groups.get(name, self.workers), self._givers(node))
                elif value.is_graph_output():
                    raise ConfigurationError(
                        f"DataParallel: statistics='rank0': the running statistics of '{LAYER.get(node)}' "
                        f"are read in the step that updates them, for '{name}': take statistics='mean'"
                    )
                following = {output for user, _ in value.uses() for output in user.outputs} - found
                found |= following
                pending += following
        return groups

    def join_statistics(self, of_rank0: bool) -> dict[int, Tensor]:
        """Exchange the updates of running statistics; return their number of elements, float64 [1], by the number of contributing
        workers.
        """
        counts: dict[int, Tensor] = {}
        rank = WORKER_RANK(builder=Builder(self.graph, before=next(iter(self.graph)))) if of_rank0 else None
        for node in [node for node in self.graph if SHARD_MEAN.is_of(node) or SHARD_COUNT.is_of(node)]:
            builder = Builder(self.graph, before=node)
            if SHARD_COUNT.is_of(node):
                replace_node(node, builder.tensors(node.inputs[:1]))
                continue
            mean, variance, weight = builder.tensors(node.inputs)
            if self._group_of(node) == 0:
                replace_node(node, (mean, variance))
                continue
            given: tuple[Tensor, ...] = (builder.cast(mean, DOUBLE), builder.cast(variance, DOUBLE))
            givers = self.workers
            if rank is None:
                share = builder.cast(weight, DOUBLE)
                number = builder.op("Reshape", share, builder.integers([1]), shape=[1])
                given = (given[0] * share, given[1] * share, number)
            else:
                givers = self._givers(node)
                gives = builder.op("Less", builder.tensor(rank.value), builder.scalar(givers, ir.DataType.INT64), shape=[])
                one, zero = builder.cast(builder.integers([1]), DOUBLE), builder.scalar(0.0, DOUBLE)
                # A product with 0 would pass on another worker's NaN and infinities.
                given = tuple(builder.op("Where", gives, tensor, zero, like=tensor) for tensor in (*given, one))
            means, variances, total = all_reduce(given, "average")
            counts.setdefault(givers, total)
            total = builder.op("Max", total, 1.0)
            replace_node(node, (builder.cast(means / total, mean.dtype), builder.cast(variances / total, variance.dtype)))
        return counts
