"""Bodies of nodes: their copies, and the gradient of a body that runs once per iteration.

The gradient of a Loop or Scan is a Loop from the last iteration to the first.

With states s, slices x, captured values c and rows y, iteration t is s[t+1], y[t] = f(s[t], x[t], c). The reverse pass carries
the cotangent of the states and the sums for the captured values:

    ds[t], dx[t], dc += (df/d(s, x, c))^T (ds[t+1], dy[t])

It needs s[t] of every iteration: the forward node returns the states that are read, stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import (
    FLOATING,
    Builder,
    Tensor,
    attribute_value,
    constant_array,
    describe_node,
    replace_value,
    same_shape,
    zeros_like,
)
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.graph.uses import remove_unread_nodes
from burnish.operators.registry import Operation
from burnish.operators.semantic import needed_for, reached_from
from burnish.operators.time_loop import reversed_frames


def body_of(op: Operation, name: str) -> ir.Graph:
    """Return a body of a node, with a separate value for every output."""
    body: ir.Graph = op.attribute(name)
    body.opset_imports.update(op.builder.graph.opset_imports)
    held = {*body.inputs, *body.initializers.values(), *(output for node in body for output in node.outputs)}
    for position, output in enumerate(body.outputs):
        if output not in held:
            body.outputs[position] = Builder(body).op("Identity", Tensor(op.builder, output)).value
    return body


def copy_of_body(body: ir.Graph) -> tuple[ir.Graph, list[ir.Value]]:
    """Return a copy of a body that reads the same outer values but has no outputs; and the values that were its outputs."""
    copy = body.clone(allow_outer_scope_values=True)
    outputs = list(copy.outputs)
    copy.outputs.clear()
    return copy, outputs


def finish_body(op: Operation, body: ir.Graph) -> None:
    """Remove unread nodes from a body with complete outputs.

    Raises:
        GradientError: it recomputes random draws of the forward body, which would differ.
    """
    remove_unread_nodes(body)
    for node in body.all_nodes():
        if node.domain == "" and node.op_type in RANDOM_OPERATORS and not _is_inference(node):
            raise GradientError(
                f"{describe_node(node)} draws random numbers in a body of {op}, and the gradient, which computes that body "
                "again, would draw others. Set it to inference, move it out of the body, or train with burnish.compile, where "
                "draws come from a key"
            )


def _is_inference(node: ir.Node) -> bool:
    if node.op_type != "Dropout":
        return False
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    training = constant_array(node.inputs[2])
    return training is not None and not training.any()


def return_from(builder: Builder, tensors: Sequence[Tensor]) -> None:
    """Make tensors the outputs of the body under construction: each output is a distinct value made by one of its nodes."""
    body = builder.graph
    for tensor in tensors:
        producer = tensor.value.producer()
        is_taken = producer is None or producer.graph is not body or tensor.value.is_graph_output()
        body.outputs.append(builder.op("Identity", tensor, like=tensor).value if is_taken else tensor.value)


def emit_with_bodies(
    builder: Builder, op_type: str, inputs: Sequence[Tensor | None], bodies: Mapping[str, ir.Graph], like: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Emit a node with bodies, and name the values in them after it.

    Args:
        builder, op_type, inputs: see ``Builder.op``.
        bodies: the graphs, by attribute.
        like: for each output, a tensor of its dtype and shape.
    """
    attributes: dict[str, Any] = dict(bodies)
    results = builder.op(op_type, *inputs, outputs=len(like), **attributes)
    results = results if isinstance(results, tuple) else (results,)
    for result, pattern in zip(results, like, strict=True):
        result.value.type, result.value.shape = (
            pattern.value.type,
            None if pattern.shape is None else ir.Shape(pattern.shape.dims),
        )
    number = 0
    for body in bodies.values():
        for graph in (body, *body.subgraphs()):
            for domain, version in graph.opset_imports.items():
                builder.graph.opset_imports.setdefault(domain, version)
            for value in (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)):
                if value.name != "":
                    value.name = f"{results[0].name}/{number}"
                    number += 1
    return results


def added_up(pairs: Sequence[tuple[ir.Value, Tensor]]) -> dict[ir.Value, Tensor]:
    total: dict[ir.Value, Tensor] = {}
    for value, cotangent in pairs:
        total[value] = total[value] + cotangent if value in total else cotangent
    return total


@dataclass(frozen=True)
class Stack:
    """A tensor that holds a slice for each iteration.

    Attributes:
        axis: the axis of the slices; negative ones count from the last.
        backwards: True if the first iteration has the last slice.
    """

    axis: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class Recursion:
    """A node that runs its body once per iteration.

    Attributes:
        op: the node.
        body: its body, with a separate value for every output.
        states: number of states.
        first: the number of node inputs, of body inputs, and of body outputs before the states.
        slices: layouts of the sliced inputs after the states.
        rows: layouts of the stacked outputs after the states.
        counted: emits the number of iterations, an int64 scalar.
    """

    op: Operation
    body: ir.Graph
    states: int
    first: tuple[int, int, int]
    slices: Sequence[Stack]
    rows: Sequence[Stack]
    counted: Callable[[], Tensor]

    def inputs(self, body_inputs: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return the states and the slices among the inputs of a body."""
        first = self.first[1]
        return list(body_inputs[first : first + self.states]), list(body_inputs[first + self.states :])

    def outputs(self, body_outputs: Sequence[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return the next states and the rows among the outputs of a body."""
        first = self.first[2]
        return list(body_outputs[first : first + self.states]), list(body_outputs[first + self.states :][: len(self.rows)])

    def kept(self, index: int) -> Tensor:
        """Make the node return a state as it was at the start of each iteration."""
        return stacked_input(self.op, self.body, self.first[1] + index, self.first[2], self.states, self.rows)


Counters = Callable[[Builder, Tensor], Sequence[Tensor]]
"""Emits the values of the body's inputs before the states in iteration t."""


def reverse(recursion: Recursion, cotangents: Sequence[Tensor | None], counters: Counters) -> tuple[Tensor | None, ...]:
    """Emit the gradient of a recursion, and return that of each input and captured value of its node.

    Args:
        recursion: the node.
        cotangents: cotangents of its original outputs; outputs added later have none.
        counters: emits the body's inputs that are neither states nor slices.

    Raises:
        GradientError: the backward pass reads a state that changes its shape between iterations, or is not a tensor.
    """
    op, outer = recursion.op, recursion.op.builder
    captured = op.captured
    wanted = [value for index, value in enumerate(captured) if op.wants(len(op.inputs) + index)]
    padded = [*cotangents, *(None for _ in range(recursion.states + len(recursion.rows)))]
    final, stacked = padded[: recursion.states], padded[recursion.states :][: len(recursion.rows)]
    carried, flows_from = _active(recursion, wanted, final, stacked)
    if not carried and not flows_from:
        return (None,) * (len(op.inputs) + len(captured))
    for index in carried:
        _check_is_tensor(recursion, index)
    count = recursion.counted()

    body, body_outputs = copy_of_body(recursion.body)
    inner = Builder(body)
    before, (states, slices) = list(body.inputs), recursion.inputs(body.inputs)
    following, rows = recursion.outputs(body_outputs)
    number = _input("number", ir.TensorType(ir.DataType.INT64), ir.Shape([]))
    condition = _input("condition", ir.TensorType(ir.DataType.BOOL), ir.Shape([]))
    iteration = inner.op("Sub", inner.op("Sub", inner.tensor(count.value), 1), inner.tensor(number))
    flowing = {
        index: _input(f"flowing{index}", following[index].type, _kept_shape(states[index], following[index])) for index in carried
    }
    incoming = [(following[index], inner.tensor(value)) for index, value in flowing.items()]
    for index in flows_from:
        whole = _there(stacked[index]).value
        incoming.append((rows[index], _slice(inner, whole, recursion.rows[index], iteration, count, rows[index])))
    sliced = [index for index, value in enumerate(slices) if op.wants(recursion.first[0] + recursion.states + index)]
    sources = [*(states[index] for index in carried), *(slices[index] for index in sliced), *wanted]
    gradients = op.differentiate(inner, added_up(incoming), sources)

    sliced = [index for index in sliced if gradients[slices[index]] is not None]
    summed = [value for value in wanted if gradients[value] is not None]
    sums = [_input(f"sum{index}", value.type, value.shape) for index, value in enumerate(summed)]
    totals = [inner.tensor(total) + _there(gradients[value]) for total, value in zip(sums, summed, strict=True)]
    earlier = [gradients[states[index]] or zeros_like(inner.tensor(states[index])) for index in carried]
    of_slices = [_there(gradients[slices[index]]) for index in sliced]
    return_from(inner, [inner.op("Identity", inner.tensor(condition)), *earlier, *totals, *of_slices])
    finish_body(op, body)
    _read_forward(recursion, inner, before, counters, count, number)
    body.inputs.extend([number, condition, *flowing.values(), *sums])

    initial = [_or_zeros(final[index], op.outputs[index], outer) for index in carried]
    initial += [zeros_like(outer.tensor(value)) for value in summed]
    like = [op.required(recursion.first[0] + index) for index in carried]
    like += [outer.tensor(value) for value in summed] + [_stack_type(outer, slices[index]) for index in sliced]
    results = (
        list(emit_with_bodies(outer, "Loop", [count, outer.constant(np.asarray(True)), *initial], {"body": body}, like))
        if like
        else []
    )
    of_states = dict(zip(carried, results, strict=False))
    of_captured = dict(zip(summed, results[len(carried) :], strict=False))
    stacks = dict(zip(sliced, results[len(carried) + len(summed) :], strict=True))
    return (
        *(None for _ in range(recursion.first[0])),
        *(of_states.get(index) for index in range(recursion.states)),
        *(None if index not in stacks else _as_input(recursion, index, stacks[index]) for index in range(len(slices))),
        *(of_captured.get(value) for value in captured),
    )


def _active(
    recursion: Recursion, wanted: Sequence[ir.Value], final: Sequence[Tensor | None], stacked: Sequence[Tensor | None]
) -> tuple[list[int], list[int]]:
    """Return the numbers of the states that a cotangent flows through, and of the rows that it comes from.

    Both depend on the differentiated values, and the rows also on these states.
    """
    op, first = recursion.op, recursion.first[0]
    nodes = list(recursion.body)
    states, slices = recursion.inputs(recursion.body.inputs)
    following, rows = recursion.outputs(recursion.body.outputs)
    moving = {index for index in range(recursion.states) if op.wants(first + index)}
    sources = {*wanted, *(value for index, value in enumerate(slices) if op.wants(first + recursion.states + index))}
    while True:
        reached = reached_from(nodes, sources | {states[index] for index in moving})
        more = {index for index, value in enumerate(following) if value in reached and value.dtype in FLOATING} - moving
        if not more:
            break
        moving |= more
    asked = {index for index, cotangent in enumerate(final) if cotangent is not None}
    flows_from = [index for index, row in enumerate(rows) if stacked[index] is not None and row in reached]
    targets = {rows[index] for index in flows_from}
    while True:
        needed = needed_for(nodes, targets | {following[index] for index in asked})
        more = {index for index, value in enumerate(states) if value in needed} - asked
        if not more:
            break
        asked |= more
    return sorted(moving & asked), flows_from


def _read_forward(
    recursion: Recursion, inner: Builder, before: Sequence[ir.Value], counters: Counters, count: Tensor, number: ir.Value
) -> None:
    """Replace the inputs of a copy of the body with their values in the current iteration."""
    body = inner.graph
    front = Builder(body, before=next(iter(body), None))
    states, slices = recursion.inputs(before)
    counted = list(before[: recursion.first[1]])
    body.inputs.clear()
    if not any(value.uses() for value in before):
        return
    iteration = front.op("Sub", front.op("Sub", front.tensor(count.value), 1), front.tensor(number))
    for value, counter in zip(counted, counters(front, iteration), strict=True):
        value.replace_all_uses_with(counter.value)
    for index, value in enumerate(states):
        if value.uses() and _reads_shapes_alone(value):
            _read_shapes(recursion, index, value, front, lambda whole: _shape_at(front, whole, iteration, count))
        elif value.uses():
            _check_kept(recursion, index)
            kept = recursion.kept(index)
            value.replace_all_uses_with(_slice(front, kept.value, Stack(), iteration, count, value).value)
    for index, (value, stack) in enumerate(zip(slices, recursion.slices, strict=True)):
        if value.uses():
            whole = recursion.op.required(recursion.first[0] + recursion.states + index)
            value.replace_all_uses_with(_slice(front, whole.value, stack, iteration, count, value).value)
    remove_unread_nodes(body)


def _shape_at(builder: Builder, shapes: ir.Value, iteration: Tensor, count: Tensor) -> Tensor:
    extent = None if shapes.shape is None else ir.Shape(shapes.shape.dims[1:])
    return _slice(builder, shapes, Stack(), iteration, count, ir.Value(name="", type=shapes.type, shape=extent))


def _reads_shapes_alone(value: ir.Value) -> bool:
    return all(node.op_type == "Shape" and node.domain == "" for node, _ in value.uses())


def _read_shapes(recursion: Recursion, index: int, value: ir.Value, front: Builder, at: Callable[[ir.Value], Tensor]) -> None:
    """Make a copy of the body read stacked shapes of a state: they can be kept even if iterations change the shape.

    Args:
        recursion: the node.
        index: index of the state.
        value: the state in the copy.
        front: emits into the copy.
        at: emits the slice of the iteration from a stacked value.
    """
    inside = Builder(recursion.body)
    shape = inside.op("Shape", inside.tensor(recursion.body.inputs[recursion.first[1] + index]))
    shape.value.name = f"{value.name}:shape"
    of_iteration = at(stacked_value(recursion.op, recursion.body, shape.value, recursion.first[2]).value)
    for node, _ in list(value.uses()):
        start, end = attribute_value(node, "start", 0), attribute_value(node, "end", None)
        part = of_iteration
        if start or end is not None:
            bounds = (front.integers([start]), front.integers([2**62 if end is None else end]))
            part = front.op("Slice", of_iteration, *bounds, like=front.tensor(node.outputs[0]))
        replace_value(node.outputs[0], part.value)


def _check_kept(recursion: Recursion, index: int) -> None:
    op = recursion.op
    value, following = recursion.inputs(recursion.body.inputs)[0][index], recursion.outputs(recursion.body.outputs)[0][index]
    initial = op.required(recursion.first[0] + index).value
    _check_is_tensor(recursion, index)
    shapes = [shape for shape in (initial.shape, value.shape, following.shape) if shape is not None]
    for one in shapes:
        for other in shapes:
            pairs = zip(one.dims, other.dims, strict=False)
            if len(one) != len(other) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
                raise GradientError(
                    f"{describe_node(op.node)} carries '{initial.name}' from shape {one} to shape {other}, and its gradient "
                    "reads it as each iteration began with it. Export the model with a state of one shape that iterations write "
                    "to, such as by ScatterND, or with the rows as an output of the loop"
                )


def _check_is_tensor(recursion: Recursion, index: int) -> None:
    value = recursion.inputs(recursion.body.inputs)[0][index]
    initial = recursion.op.required(recursion.first[0] + index).value
    if not all(each.type is None or isinstance(each.type, ir.TensorType) for each in (value, initial)):
        raise GradientError(
            f"{describe_node(recursion.op.node)} carries '{initial.name}', which is no tensor, and its gradient goes through it. "
            "Export the model with a tensor that iterations write to, or with rows as outputs of the loop"
        )


def _slice(builder: Builder, whole: ir.Value, stack: Stack, iteration: Tensor, count: Tensor, like: ir.Value) -> Tensor:
    if stack.backwards:
        iteration = builder.op("Sub", builder.op("Sub", builder.tensor(count.value), 1), iteration)
    return builder.op("Gather", builder.tensor(whole), iteration, axis=stack.axis, like=builder.tensor(like))


def _as_input(recursion: Recursion, index: int, gradients: Tensor) -> Tensor:
    """Emit the gradient of a sliced input from the gradients of its slices, in the order of their computation."""
    stack, builder = recursion.slices[index], gradients.builder
    whole = recursion.op.required(recursion.first[0] + recursion.states + index)
    ordered = gradients if stack.backwards else reversed_frames(gradients)
    if stack.axis != 0:
        if whole.rank is None:
            raise GradientError(
                f"{recursion.op} slices '{whole.name}' along axis {stack.axis}, and its gradient has to know how many axes that "
                "has: declare its shape in the model, in which any dimension may be symbolic"
            )
        axis = stack.axis % whole.rank
        order = [*range(1, axis + 1), 0, *range(axis + 1, whole.rank)]
        ordered = builder.op("Transpose", ordered, perm=order)
    if whole.shape is not None and all(isinstance(extent, int) for extent in whole.shape.dims):
        ordered.value.shape = ir.Shape(whole.shape.dims)
        return ordered
    # With zero iterations a runtime knows only the rank of a slice.
    return builder.op("Reshape", ordered, builder.op("Shape", whole), allowzero=1, like=whole)


def _input(name: str, value_type: ir.TypeProtocol | None, shape: ir.Shape | None) -> ir.Value:
    """Return a new input of a body. Its name lasts until the node is emitted."""
    return ir.Value(name=name, type=value_type, shape=None if shape is None else ir.Shape(shape.dims))


def _kept_shape(value: ir.Value, following: ir.Value) -> ir.Shape | None:
    return value.shape if same_shape(value.shape, following.shape) else None


def _stack_type(builder: Builder, value: ir.Value) -> Tensor:
    shape = None if value.shape is None else ir.Shape([None, *value.shape.dims])
    return builder.tensor(_input("", value.type, shape))


def _or_zeros(cotangent: Tensor | None, output: Tensor, builder: Builder) -> Tensor:
    return zeros_like(output) if cotangent is None else builder.tensor(cotangent.value)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def stacked_input(op: Operation, body: ir.Graph, index: int, first: int, states: int, rows: Sequence[Stack]) -> Tensor:
    """Make the node of a recursion return an input of its body from each iteration, stacked along axis 0.

    Args:
        op: the node.
        body: its body.
        index: index of the input of the body.
        first: number of outputs of the body before the states.
        states: number of states.
        rows: layouts of the node's outputs after the states; added outputs are stacked along axis 0.

    Returns:
        An output of the node: an existing one if it is the same.
    """
    node, value = op.node, body.inputs[index]
    node.resize_outputs(len(body.outputs) - first)
    for position in range(first + states, len(body.outputs)):
        row = position - first - states
        made_by = body.outputs[position].producer()
        is_same = made_by is not None and made_by.op_type == "Identity" and made_by.inputs[0] is value
        if is_same and (row >= len(rows) or rows[row] == Stack()):
            return _named(op, position - first, value)
    identity = Builder(body).op("Identity", Tensor(op.builder, value)).value
    identity.name = f"{value.name}:kept"
    return stacked_value(op, body, identity, first)


def stacked_value(op: Operation, body: ir.Graph, value: ir.Value, first: int) -> Tensor:
    """Make the node of a recursion return a value of its body that is no output yet, stacked over iterations along axis 0."""
    node = op.node
    body.outputs.append(value)
    node.resize_outputs(len(body.outputs) - first)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*op.attribute(name), 0])
    return _named(op, len(node.outputs) - 1, value)


def _named(op: Operation, position: int, value: ir.Value) -> Tensor:
    """Return an output of a node that stacks a value; a new output gets a name and its type."""
    output = op.node.outputs[position]
    stem = next(each.name for each in op.node.outputs if each.name)
    output.name = output.name or f"{stem}:{position}"
    output.type = value.type
    if output.shape is None and value.shape is not None:
        output.shape = ir.Shape([None, *value.shape.dims])
    return op.builder.tensor(output)


def count_of(stack: Tensor, axis: int = 0) -> Tensor:
    builder = stack.builder
    return builder.op("Gather", builder.op("Shape", stack), builder.constant(np.asarray(axis, np.int64)), axis=0)
