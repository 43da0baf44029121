"""Batch normalization in a training graph: normalization by policy, and the next running statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import SIXTEEN_BIT, Builder, Names, Tensor, attribute_value, bodies
from burnish.graph.annotations import BRANCH_LAYER, LAYER, POLICY
from burnish.norms.policies import CUMULATIVE, BatchStatistics, Ghost, NormPolicy, Renorm, RunningVariance, Train, layer_name
from burnish.operators.collectives import SHARD_COUNT, SHARD_MEAN
from burnish.operators.normalization.batch import BATCH_RENORM_TRAINING, batch_norm_training, ghost_batch_norm_training
from burnish.operators.normalization.statistics import elements_per_channel


class RunningStatistics:
    """The running statistics of a training graph: their next values, and the step counts of rules and schedules.

    Args:
        variance: the variance of a batch that enters the running variance.
        policies: the policies of all layers in the graph.
        step: returns the step counter, an int64 scalar: the number of completed updates. None if no policy counts steps.

    Attributes:
        updated: running statistic -> its next value, for each that a step updates.
    """

    def __init__(
        self, variance: RunningVariance, policies: Mapping[ir.Node, NormPolicy], step: Callable[[], ir.Value] | None = None
    ):
        self.updated: dict[ir.Value, ir.Value] = {}
        self._variance = variance
        self._step = step
        self._scalars: dict[tuple[object, ...], ir.Value] = {}
        updating = [node for node, policy in policies.items() if isinstance(policy, BatchStatistics)]
        self._uses = Counter(value for node in updating for value in node.inputs[3:5])
        self._done: Counter[ir.Value] = Counter()

    def replaced(self, updated: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Replace the next values, at the start or end of a branch; return the previous ones."""
        before, self.updated = self.updated, dict(updated)
        return before

    def current(self, builder: Builder, running: ir.Value) -> Tensor:
        """Return the running statistic after the layers before this one; layers may share one."""
        return builder.tensor(self.updated.get(running, running))

    def ramp(self, builder: Builder, policy: Renorm, end: int, first: float, last: float, dtype: ir.DataType) -> Tensor:
        """Emit a bound of batch renormalization at this step, once for all layers of the policy."""
        emit = partial(self._linear, builder, policy.start, end, first, last)
        return builder.cast(self._once(builder, (policy.start, end, first, last), emit), dtype)

    def update(
        self,
        builder: Builder,
        running: tuple[ir.Value, ir.Value],
        batch: tuple[Tensor, Tensor, Tensor],
        momentum: float | str,
        over_workers: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        seen: int = 0,
    ) -> list[Tensor]:
        """Emit the next running mean and variance.

        Args:
            builder: emits into the graph.
            running: the running mean and variance.
            batch: mean and population variance of the batch, and the number of elements.
            momentum: the share to keep, or ``cumulative``.
            over_workers: emits the joint statistics of several workers, from mean and variance.
            seen: number of batches in the model's statistics.
        """
        mean, variance, count = batch
        if self._variance is RunningVariance.PYTORCH:
            # The maximum with 1 avoids NaN: a single element per channel would divide its variance 0 by N - 1 = 0.
            variance = variance * builder.cast(count / builder.op("Max", count - 1, 1), variance.dtype)
        mean, variance = over_workers(mean, variance)
        following = []
        for value, statistic in zip(running, (mean, variance), strict=True):
            before = self.current(builder, value)
            following.append(self._blend(builder, value, before, builder.cast(statistic, before.dtype), momentum, seen))
            self.updated[value] = following[-1].value
            self._done[value] += 1
        return following

    def _blend(
        self, builder: Builder, value: ir.Value, before: Tensor, batch: Tensor, momentum: float | str, seen: int
    ) -> Tensor:
        if momentum != CUMULATIVE:
            return before * float(momentum) + batch * (1.0 - float(momentum))
        # The number of updates including this one; each layer that shares a statistic updates it.
        uses, done = self._uses[value], self._done[value]
        emit = partial(self._count, builder, uses, seen + done + 1, before.dtype)
        return before + (batch - before) / self._once(builder, (uses, seen + done, before.dtype), emit)

    def _count(self, builder: Builder, uses: int, now: int, dtype: ir.DataType) -> Tensor:
        return builder.cast(self._steps(builder) * uses + now, dtype)

    def _linear(self, builder: Builder, start: int, end: int, first: float, last: float) -> Tensor:
        if start == end:
            return builder.scalar(last, ir.DataType.DOUBLE)
        return linear(self._steps(builder), start, end, first, last)

    def _steps(self, builder: Builder) -> Tensor:
        if self._step is None:
            raise AssertionError("a policy counts steps in a graph that has no step counter")
        return builder.tensor(self._step())

    def _once(self, builder: Builder, key: tuple[object, ...], emit: Callable[[], Tensor]) -> Tensor:
        """Emit a scalar once, before the first layer that needs it."""
        if key not in self._scalars:
            self._scalars[key] = emit().value
        return builder.tensor(self._scalars[key])


def normalize(builder: Builder, node: ir.Node, policy: BatchStatistics, statistics: RunningStatistics) -> tuple[Tensor, ...]:
    """Emit a batch normalization with statistics of the batch.

    Args:
        builder: emits before the node.
        node: a BatchNormalization.
        policy: its policy.
        statistics: the statistics of the graph, updated here.

    Returns:
        y, the next running mean, the next running variance: the node's outputs.
    """
    given, scale, bias = (builder.tensor(value) for value in node.inputs[:3] if value is not None)
    # float16 cannot even count the elements of an image, so 16-bit values have float32 statistics.
    dtype = ir.DataType.FLOAT if given.dtype in SIXTEEN_BIT else given.dtype
    x, scale, bias = (builder.cast(tensor, dtype) for tensor in (given, scale, bias))
    mean_value, variance_value = (value for value in node.inputs[3:5] if value is not None)
    # The standard stores attributes as float32; a graph built in memory may hold more digits.
    epsilon = float(np.float32(attribute_value(node, "epsilon", 1e-5)))
    momentum = float(attribute_value(node, "momentum", 0.9))
    elements = elements_per_channel(x)
    if isinstance(policy, Ghost):
        y, mean, variance, count = ghost_batch_norm_training(builder, x, scale, bias, epsilon, policy.size)
    else:
        if isinstance(policy, Renorm):
            running_mean = builder.cast(statistics.current(builder, mean_value), dtype)
            running_variance = builder.cast(statistics.current(builder, variance_value), dtype)
            r_max = statistics.ramp(builder, policy, policy.r_max_step, 1.0, policy.r_max, scale.dtype)
            d_max = statistics.ramp(builder, policy, policy.d_max_step, 0.0, policy.d_max, scale.dtype)
            operands = (x, scale, bias, running_mean, running_variance, r_max, d_max)
            y, mean, _, variance, *_ = BATCH_RENORM_TRAINING.emit(*operands, builder=builder, epsilon=epsilon)
        else:
            y, mean, _, variance = batch_norm_training(builder, x, scale, bias, epsilon)
        _mark(y, policy, node)
        count = SHARD_COUNT(elements, mean)
        _mark(count, policy, node)

    def over_workers(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = SHARD_MEAN.emit(mean, variance, elements)
        _mark(mean, policy, node)
        return mean, variance

    retained = momentum if policy.momentum is None else policy.momentum
    running = (mean_value, variance_value)
    following = statistics.update(builder, running, (mean, variance, count), retained, over_workers, policy.seen)
    return (builder.cast(y, given.dtype), *following)


def normalize_without_statistics(builder: Builder, node: ir.Node) -> Tensor:
    """Emit a batch normalization with batch statistics and no running ones; workers synchronize it like ``train``.

    Args:
        builder: emits before the node.
        node: a BatchNormalization that computes its statistics from the batch.
    """
    given, scale, bias = (builder.tensor(value) for value in node.inputs[:3] if value is not None)
    dtype = ir.DataType.FLOAT if given.dtype in SIXTEEN_BIT else given.dtype
    x, scale, bias = (builder.cast(tensor, dtype) for tensor in (given, scale, bias))
    y, *_ = batch_norm_training(builder, x, scale, bias, float(np.float32(attribute_value(node, "epsilon", 1e-5))))
    _mark(y, Train(), node)
    return builder.cast(y, given.dtype)


def _mark(result: Tensor, policy: NormPolicy, node: ir.Node) -> None:
    producer = result.value.producer()
    assert producer is not None
    POLICY.set(producer, str(policy))
    LAYER.set(producer, layer_name(node))


def linear(step: Tensor, start: int, end: int, first: float, last: float) -> Tensor:
    """Return ``first`` up to step ``start``, ``last`` from step ``end`` on, and linear values between, as a float64 scalar.

    Args:
        step: int64 scalar, the number of updates before this one.
        start, end: steps, ``start`` before ``end``.
        first, last: the values at these steps.
    """
    builder = step.builder
    done = builder.op("Min", builder.op("Max", step - start, 0), end - start)
    return builder.cast(done, ir.DataType.DOUBLE) * ((last - first) / (end - start)) + first


BindLayer = Callable[[ir.Graph, ir.Node, NormPolicy, RunningStatistics], None]


def is_branching(node: ir.Node) -> bool:
    return node.op_type == "If" and node.domain == ""


def bind_layers(
    graph: ir.Graph,
    policies: Mapping[ir.Node, NormPolicy],
    statistics: RunningStatistics,
    bind: BindLayer,
    names: Names | None = None,
) -> None:
    """Bind the batch normalization nodes of a graph and its branches, in place and in order.

    An If returns the running statistics of its branches: the next values from the branch with the layer, the current ones from
    the other.

    Args:
        graph: the graph.
        policies: the policy of each batch normalization node outside loops.
        statistics: the statistics of the graph, updated here.
        bind: binds one node in its graph.
        names: the names in use, if the graph is itself a branch.

    Raises:
        ConfigurationError: a layer in a branch counts the steps in which it normalizes.
    """
    is_branch = names is not None
    for node in list(graph):
        if node in policies:
            if is_branch:
                _check_no_count(node, policies[node])
            bind(graph, node, policies[node], statistics)
        elif is_branching(node):
            names = names or Names.of(graph)
            _bind_branches(graph, node, policies, statistics, bind, names)


def _check_no_count(node: ir.Node, policy: NormPolicy) -> None:
    if isinstance(policy, Renorm) or (isinstance(policy, BatchStatistics) and policy.momentum == CUMULATIVE):
        name = layer_name(node)
        raise ConfigurationError(
            f"norm: the batch normalization '{name}' is in a branch, and '{policy}' counts the steps in which it normalizes, "
            f"which are not known there: choose another policy, norm={{'{name}': 'train'}}"
        )


def _bind_branches(
    graph: ir.Graph,
    node: ir.Node,
    policies: Mapping[ir.Node, NormPolicy],
    statistics: RunningStatistics,
    bind: BindLayer,
    names: Names,
) -> None:
    before = statistics.updated
    layers = [layer for body in bodies(node) for layer in body if isinstance(policies.get(layer), BatchStatistics)]
    if layers:
        BRANCH_LAYER.set(node, layer_name(layers[0]))
    branches: list[tuple[ir.Graph, dict[ir.Value, ir.Value]]] = []
    for body in bodies(node):
        statistics.replaced(before)
        body.opset_imports.update(graph.opset_imports)
        bind_layers(body, policies, statistics, bind, names)
        branches.append((body, statistics.replaced(before)))
    moved = dict.fromkeys(
        value for _, updated in branches for value, following in updated.items() if before.get(value) is not following
    )
    for value in moved:
        for body, updated in branches:
            following = updated.get(value, value)
            builder = Builder(body)
            body.outputs.append(builder.op("Identity", builder.tensor(following), like=builder.tensor(value)).value)
        node.resize_outputs(len(node.outputs) + 1)
        output = node.outputs[-1]
        output.name, output.type = names.take(f"{node.outputs[0].name}:{value.name}"), value.type
        output.shape = None if value.shape is None else ir.Shape(value.shape.dims)
        statistics.updated[value] = output
