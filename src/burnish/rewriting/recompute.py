"""Recomputation: the backward pass recomputes forward activations from checkpoints instead of keeping them.

The same nodes run again on the same operands, so gradients stay identical. Never repeated: random draws (their mask is kept),
updates of statistics, collectives, reductions to something small, and values that depend only on weights. The standard's batch
normalization is repeated in full, since ONNX Runtime's kernel rounds the inverse deviation differently in inference and training
mode.

A runtime may run a copy as soon as its operands exist, or merge it with the original node. Data dependencies prevent both: a copy
reads its checkpoint through a Reshape to the checkpoint's own shape plus a zero, computed from the incoming gradient of the next
layer and from weight gradients finished since the previous copies. No execution order, constant folding or static shape reveals
the zero before those gradients, and a segment's memory is free before the next is recomputed. The Reshape moves no data.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from burnish.analysis.memory_plan import Task, planned_peak, value_bytes
from burnish.errors import ConfigurationError
from burnish.graph import (
    FLOATING,
    Builder,
    Tensor,
    remove_node,
    replace_node,
    source_of,
)
from burnish.graph.annotations import NEVER_REPEATED, RECOMPUTES, SOURCE
from burnish.graph.uses import copy_of, remove_unused
from burnish.rewriting.recompute_choice import Forward, fitting, layers
from burnish.rewriting.recompute_request import BudgetError, Recompute, forget_origins, matching_nodes

_log = logging.getLogger("burnish")


def recompute_activations(
    model: ir.Model,
    request: Recompute,
    *,
    loss: str,
    data: Collection[str],
    keys: Collection[str],
    planned: ir.Model | None = None,
    in_place: Collection[str] = (),
    strict: bool = True,
) -> None:
    """Rewrite, in place, a lowered training graph to recompute activations instead of keeping them.

    Args:
        model: a lowered graph with its backward pass. Remaining semantic operators are repeated too, except exchanges.
        request: the option that selects the recomputed nodes.
        loss: the output that ends the forward pass.
        data: inputs that activations depend on.
        keys: inputs of random draws.
        planned: the graph whose peak counts if ``model`` is its first part: the whole training step.
        in_place: outputs of that graph that overwrite its inputs and need no memory.
        strict: True to raise an error if a pattern matches no repeatable node or the budget is out of reach. Otherwise the
            pattern is ignored, and the plan with the least peak is used, with a log message about the excess.

    Raises:
        ConfigurationError: see ``strict``.
    """

    def forward_of(whole: ir.Model, sizes: dict[ir.Value, int | None]) -> Forward:
        end = next(value for value in whole.graph.outputs if value.name == loss)
        return Forward(whole.graph, end, data, keys, sizes)

    if planned is None:
        forward = forward_of(model, _sizes(model, request))
        chosen = _chosen(model, forward, request, strict)
    else:
        sizes = {value: 0 if value.name in in_place else size for value, size in _sizes(planned, request).items()}
        whole, forward = forward_of(planned, sizes), forward_of(model, _sizes_by_name(model.graph, sizes))
        chosen = _by_name(_chosen(planned, whole, request, strict), whole, forward)
    _Rewriting(forward).rewrite(forward.schedule(chosen))
    forget_origins(model.graph)
    remove_unused(model)


def _by_name(chosen: Collection[int], whole: Forward, forward: Forward) -> set[int]:
    names = {whole.values[number].name for number in chosen}
    return {number for number in forward.droppable if forward.values[number].name in names}


def _sizes_by_name(graph: ir.Graph, sizes: Mapping[ir.Value, int | None]) -> dict[ir.Value, int | None]:
    known = {value.name: size for value, size in sizes.items()}
    return {value: known.get(value.name) for value in (*graph.inputs, *(output for node in graph for output in node.outputs))}


def _sizes(model: ir.Model, request: Recompute) -> dict[ir.Value, int | None]:
    """Return the sizes to plan with: without batch and budget, the growth per sample if the batch is symbolic."""
    if request.batch is not None or request.budget is not None:
        return value_bytes(model, request.batch or 1)
    one, two = value_bytes(model, 1), value_bytes(model, 2)
    growth: dict[ir.Value, int | None] = {value: (two[value] or 0) - (size or 0) for value, size in one.items()}
    return growth if any(growth.values()) else dict(one)


def _chosen(model: ir.Model, forward: Forward, request: Recompute, strict: bool) -> Collection[int]:
    if request.patterns:
        return _matched(forward, request.patterns, strict)
    if request.budget is None:
        return layers(forward).dropped
    batch, budget = request.batch or 1, request.budget
    inputs = planned_peak(model, batch).inputs
    chosen, least = fitting(forward, lambda plan: inputs + plan.peak <= budget)
    if chosen is None:
        excess = (
            f"does not fit {budget:,} bytes at batch {batch}; the least that recomputation reaches is {inputs + least.peak:,} "
            f"bytes, of which state and batch take {inputs:,}"
        )
        if strict:
            raise BudgetError(f"recompute: the {model.graph.name} graph {excess}: give a larger budget or a smaller batch")
        _log.warning("burnish: recompute: the %s graph as the engine runs it %s, which is taken", model.graph.name, excess)
    return (chosen or least).dropped


def _matched(forward: Forward, patterns: tuple[str, ...], strict: bool) -> set[int]:
    dropped: set[int] = set()
    nodes = forward.nodes[: forward.end]
    for pattern in patterns:
        matched = matching_nodes(nodes, pattern)
        values = {value for index in matched for value in forward.writes[index] if value in forward.droppable}
        if not values and strict:
            reason = "matches only what is never computed twice" if matched else "matches no node or value"
            raise ConfigurationError(
                f"recompute: pattern '{pattern}' {reason} of the forward pass; give names or patterns of nodes as a viewer shows "
                "them, such as 'layer1*'"
            )
        dropped |= values
    return dropped


def run_in_order(model: ir.Model) -> bool:
    """Let copies read their checkpoints directly, in place, for engines that run nodes in order and merge none."""
    waiting = [node for node in model.graph if node.op_type == "Reshape" and _waits(node)]
    for node in waiting:
        node.outputs[0].replace_all_uses_with(node.inputs[0])  # type: ignore[arg-type]
        remove_node(node)
    if waiting:
        remove_unused(model)
    return bool(waiting)


def wait_by_selection(model: ir.Model) -> bool:
    """Make copies wait through values instead of shapes, in place, for compilers that need all shapes in advance.

    A Where on the zero selects the checkpoint in both cases, which keeps its bits. It costs a copy unless the compiler fuses it
    with a reader.
    """
    conditions: dict[ir.Value, ir.Value] = {}
    for node in [node for node in model.graph if node.op_type == "Reshape" and _waits(node)]:
        checkpoint, shape = node.inputs
        zero = shape.producer().inputs[1]  # type: ignore[union-attr]
        assert checkpoint is not None
        assert zero is not None
        builder = Builder(model.graph, before=node)
        if zero not in conditions:
            conditions[zero] = builder.op("Equal", builder.tensor(zero), 0).value
        tensor = builder.tensor(checkpoint)
        replace_node(node, builder.op("Where", builder.tensor(conditions[zero]), tensor, tensor, like=tensor))
    if conditions:
        remove_unused(model)
    return bool(conditions)


def _waits(reshape: ir.Node) -> bool:
    shape = reshape.inputs[1]
    producer = None if shape is None else shape.producer()
    return producer is not None and RECOMPUTES.get(producer) == ()


class _Rewriting:
    def __init__(self, forward: Forward):
        self.forward = forward
        self.count = len(forward.values)
        self.again: dict[int, ir.Value] = {}
        self.waited_for = 0
        self.depth = _depth(forward)
        self.last = next(
            (
                self.depth[written[0]]
                for node, written in zip(forward.nodes[::-1], forward.writes[::-1], strict=True)
                if written and node.outputs[0].dtype in FLOATING
            ),
            -1,
        )

    def rewrite(self, tasks: list[Task]) -> None:
        passed: list[int] = []  # indices of the backward nodes so far
        group: list[Task] = []
        for task in tasks[self.forward.end :]:
            if task.outputs and task.outputs[0] >= self.count:
                group.append(task)
                continue
            if group:
                self._repeat(group, task.node, passed)
                group = []
            passed.extend(task.outputs[:1])
            for position, value in enumerate(task.node.inputs):
                number = None if value is None else self.forward.number.get(value)
                if number is not None and number in self.again and number + self.count in task.inputs:
                    task.node.replace_input_with(position, self.again[number])

    def _repeat(self, group: list[Task], before: ir.Node, passed: list[int]) -> None:
        builder = Builder(before.graph, before=before)  # type: ignore[arg-type]
        behind = _Behind(builder, [self.forward.values[number] for number in self._gradients_before(group, passed)])
        self.waited_for = len(passed)
        for task in group:
            operands: dict[ir.Value, ir.Value] = {}
            activations = [number for number in task.inputs if number < self.count and self._is_checkpoint(number)]
            depends = any(number >= self.count for number in task.inputs)
            for number in task.inputs:
                value = self.forward.values[number % self.count]
                if number >= self.count:
                    operands[value] = self.again[number - self.count]
                elif number in activations and (number in self.forward.droppable or not depends):
                    operands[value] = behind(value)
                else:
                    operands[value] = value
            copy = _copy(task, operands)
            builder.graph.insert_before(before, copy)
            for number, output in zip(task.outputs, copy.outputs, strict=True):
                self.again[number - self.count] = output
            RECOMPUTES.set(copy, [self.forward.values[number - self.count].name or "" for number in task.outputs])

    def _is_checkpoint(self, number: int) -> bool:
        return self.depth[number] >= 0

    def _gradients_before(self, group: list[Task], passed: list[int]) -> list[int]:
        """Return the gradients that copies wait for: the last one from values after them, and weight gradients finished since."""
        copied = max(self.forward.producer[number - self.count] for task in group for number in task.outputs)
        known = [number for number in reversed(passed) if self._is_gradient(number)]
        whole = [number for number in known if self.depth[number] >= self.last > copied]
        flowing = (whole or [number for number in known if self.depth[number] > copied])[:1]
        finished = [
            number for number in passed[self.waited_for :] if number in self.forward.outputs and self._is_gradient(number, 2)
        ]
        return [*flowing, *(number for number in finished if number not in flowing)] if flowing else []

    def _is_gradient(self, number: int, rank: int = 1) -> bool:
        value = self.forward.values[number]
        if value.dtype not in FLOATING or value.shape is None or len(value.shape) < rank:
            return False
        producer = value.producer()  # an exchange may still be in progress
        return producer is None or not NEVER_REPEATED.is_on(producer)


class _Behind:
    """Makes values that are not available before all of ``gradients``: float tensors of rank 1 or more."""

    def __init__(self, builder: Builder, gradients: Sequence[ir.Value]):
        self.builder = builder
        self.gradients = gradients
        self._zero: Tensor | None = None
        self._given: dict[ir.Value, ir.Value] = {}

    def __call__(self, value: ir.Value) -> ir.Value:
        if not self.gradients:
            return value
        if value not in self._given:
            tensor = self.builder.tensor(value)
            shape = self._op("Add", self._op("Shape", tensor), self.zero)
            again = self._op("Reshape", tensor, shape, allowzero=1, like=tensor).value
            producer = again.producer()
            assert producer is not None
            RECOMPUTES.set(producer, [value.name or ""])
            self._given[value] = again
        return self._given[value]

    @property
    def zero(self) -> Tensor:
        """An int64 zero that a runtime cannot predict."""
        if self._zero is None:
            for gradient in self.gradients:
                zero = self._zero_of(gradient)
                self._zero = zero if self._zero is None else self._op("Add", self._zero, zero)
            assert self._zero is not None
        return self._zero

    def _zero_of(self, gradient: ir.Value) -> Tensor:
        """No number, including NaN, is greater than itself."""
        begin, end = (self.builder.integers([place] * len(gradient.shape or ())) for place in (0, 1))
        first = self._op("Cast", self._op("Slice", self.builder.tensor(gradient), begin, end), to=int(ir.DataType.FLOAT))
        greater = self._op("Cast", self._op("Greater", first, first), to=int(ir.DataType.INT64))
        return self._op("ReduceSum", greater, keepdims=0)

    def _op(self, op_type: str, *inputs: Tensor, like: Tensor | None = None, **attributes: Any) -> Tensor:
        result = self.builder.op(op_type, *inputs, like=like, **attributes)
        RECOMPUTES.set(result.value.producer(), [])
        return result


def _copy(task: Task, operands: Mapping[ir.Value, ir.Value]) -> ir.Node:
    copy = copy_of(task.node, [None if value is None else operands.get(value, value) for value in task.node.inputs])
    if (source := source_of(task.node)) is not None:
        SOURCE.set(copy, source)
    return copy


def _depth(forward: Forward) -> list[int]:
    """Return, for every value, the position of the last forward node whose activation it depends on; -1 for none."""
    depth = [-1] * len(forward.values)
    for number in forward.activations:
        depth[number] = forward.producer.get(number, 0)
    for index in range(forward.end, len(forward.nodes)):
        reached = max((depth[number] for number in forward.reads[index]), default=-1)
        for number in forward.writes[index]:
            depth[number] = reached
    return depth
