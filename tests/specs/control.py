"""Branches and loops: If, Loop, Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from burnish.graph import Builder, Tensor, zeros_like
from burnish.operators.control_bodies import emit_with_bodies, return_from
from specs.operator_spec import OperatorSpec, Sample, normal

Emit = Callable[..., Sequence[Tensor]]


def body_of(builder: Builder, inputs: Sequence[tuple[ir.DataType, Sequence[int | str] | None]], emit: Emit) -> ir.Graph:
    """A body with inputs of these dtypes and shapes; ``emit(inner builder, *inputs)`` returns its outputs."""
    body = ir.Graph([], [], nodes=[], name="body", opset_imports=dict(builder.graph.opset_imports))
    inner = Builder(body)
    for index, (dtype, shape) in enumerate(inputs):
        body.inputs.append(
            ir.Value(name=f"inside{index}", type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))
        )
    return_from(inner, emit(inner, *[inner.tensor(value) for value in body.inputs]))
    return body


def of(inner: Builder, *tensors: Tensor) -> list[Tensor]:
    """Tensors of the graph around a body, to compute with in it."""
    return [inner.tensor(tensor.value) for tensor in tensors]


def results(builder: Builder, op_type: str, inputs: Sequence[Tensor | None], bodies: dict[str, ir.Graph], like: Sequence[Tensor]):
    emitted = emit_with_bodies(builder, op_type, inputs, bodies, like)
    return emitted if len(emitted) > 1 else emitted[0]


def if_(builder: Builder, condition: Tensor, then: Emit, otherwise: Emit, like: Sequence[Tensor]) -> Any:
    graphs = {"then_branch": body_of(builder, [], then), "else_branch": body_of(builder, [], otherwise)}
    return results(builder, "If", [condition], graphs, like)


def loop(
    builder: Builder,
    count: Tensor | None,
    going: Tensor | None,
    states: Sequence[Tensor],
    emit: Emit,
    rows: Sequence[Tensor] = (),
) -> Any:
    """``emit(inner, iteration, condition, *states)`` returns the condition, the next states and the rows."""
    inputs = [(ir.DataType.INT64, []), (ir.DataType.BOOL, []), *((state.dtype, state.shape) for state in states)]
    return results(builder, "Loop", [count, going, *states], {"body": body_of(builder, inputs, emit)}, [*states, *rows])


def scan(
    builder: Builder,
    states: Sequence[Tensor],
    sliced: Sequence[Tensor],
    emit: Emit,
    rows: Sequence[Tensor] = (),
    axes: Sequence[int] = (),
    directions: Sequence[int] = (),
    row_axes: Sequence[int] = (),
    row_directions: Sequence[int] = (),
) -> Any:
    """``emit(inner, *states, *slices)`` returns the next states and the rows."""
    inputs: list[tuple[ir.DataType, Sequence[Any] | None]] = [(state.dtype, state.shape) for state in states]
    for index, tensor in enumerate(sliced):
        dims = None if tensor.shape is None else list(tensor.shape.dims)
        if dims is not None:
            del dims[axes[index] if axes else 0]
        inputs.append((tensor.dtype, dims))
    graph = body_of(builder, inputs, emit)
    names = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
    given = zip(names, (axes, directions, row_axes, row_directions), strict=True)
    attributes = {name: list(numbers) for name, numbers in given if numbers}
    results = builder.op(
        "Scan", *states, *sliced, outputs=len(states) + len(rows), body=graph, num_scan_inputs=len(sliced), **attributes
    )
    emitted = results if isinstance(results, tuple) else (results,)
    for result, like in zip(emitted, [*states, *rows], strict=True):
        result.value.type, result.value.shape = like.value.type, None if like.shape is None else ir.Shape(like.shape.dims)
    for number, value in enumerate((*graph.inputs, *(output for node in graph for output in node.outputs))):
        value.name = f"{emitted[0].name}/{number}"
    return results


def row_like(builder: Builder, tensor: Tensor, extent: int | None = None, axis: int = 0) -> Tensor:
    """The type of what is stacked of a tensor."""
    dims = None if tensor.shape is None else list(tensor.shape.dims)
    if dims is not None:
        dims.insert(axis, extent)  # type: ignore[arg-type]
    return builder.tensor(ir.Value(name="like", type=tensor.value.type, shape=None if dims is None else ir.Shape(dims)))


def boolean(builder: Builder, value: bool) -> Tensor:
    return builder.constant(np.asarray(value))


def integer(builder: Builder, number: int) -> Tensor:
    return builder.constant(np.asarray(number, np.int64))


def total(builder: Builder, tensor: Tensor) -> Tensor:
    return builder.op("ReduceSum", tensor, keepdims=0)


def stacked(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(parts)) if parts else like.new_zeros([0, *like.shape])


# If


def two_branches(builder: Builder, inputs: list[Any]) -> Any:
    """Each branch reads one weight alone, both read x, and one output is an outer value in one branch."""
    x, left, right = inputs

    def then(inner: Builder) -> Sequence[Tensor]:
        a, w = of(inner, x, left)
        return inner.op("MatMul", a, w), inner.op("Identity", a)

    def otherwise(inner: Builder) -> Sequence[Tensor]:
        a, w = of(inner, x, right)
        return inner.op("Tanh", a) * w, inner.op("Exp", a) * a

    return if_(builder, builder.op("Greater", total(builder, x), 0), then, otherwise, [x, x])


def torch_two_branches(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Any:
    return (x @ left, x * 1) if x.sum() > 0 else (torch.tanh(x) * right, torch.exp(x) * x)


def if_samples(rng: np.random.Generator) -> Any:
    for sign in (1, -1):
        x = sign * np.abs(normal(rng, 2, 3))
        yield Sample(
            [x, normal(rng, 3, 3), normal(rng, 3)],
            name=f"sign{sign}",
            outputs=2,
            build=two_branches,
            torch=torch_two_branches,
        )
    yield Sample([normal(rng, 2, 3), normal(rng, 3)], name="nested", build=nested_branches, torch=torch_nested_branches)
    yield Sample(
        [normal(rng, 2, 3), normal(rng, 3, 3) * 0.5], name="loop_inside", build=loop_in_branch, torch=torch_loop_in_branch
    )


def nested_branches(builder: Builder, inputs: list[Any]) -> Any:
    x, scale = inputs

    def inside(inner: Builder) -> Sequence[Tensor]:
        (a, s) = of(inner, x, scale)
        scaled = a * s

        def positive(innermost: Builder) -> Sequence[Tensor]:
            (b, t) = of(innermost, scaled, scale)
            return [innermost.op("Sin", b) * t]

        def negative(innermost: Builder) -> Sequence[Tensor]:
            (b,) = of(innermost, scaled)
            return [b * b]

        return [if_(inner, inner.op("Less", total(inner, scaled), 1e6), positive, negative, [x])]

    def unread(inner: Builder) -> Sequence[Tensor]:
        return [inner.op("ConstantOfShape", inner.op("Shape", *of(inner, x)), value=ir.Tensor(np.ones(1, x.dtype.numpy())))]

    return if_(builder, builder.op("Less", total(builder, x), 1e6), inside, unread, [x])


def torch_nested_branches(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * scale) * scale


def loop_in_branch(builder: Builder, inputs: list[Any]) -> Any:
    x, weight = inputs

    def then(inner: Builder) -> Sequence[Tensor]:
        (a,) = of(inner, x)

        def step(innermost: Builder, iteration: Tensor, condition: Tensor, state: Tensor) -> Sequence[Tensor]:
            (w,) = of(innermost, weight)
            return condition, innermost.op("Tanh", innermost.op("MatMul", state, w))

        return [loop(inner, integer(inner, 3), None, [a], step)]

    return if_(builder, builder.op("Less", total(builder, x), 1e6), then, lambda inner: of(inner, x), [x])


def torch_loop_in_branch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ weight)
    return x


# Loop


def counted(trips: int) -> Any:
    """Two states, one of them a number; two rows; values of the graph around; one of them read by a row alone."""

    def build(builder: Builder, inputs: list[Any]) -> Any:
        h, weight, added = inputs

        def step(inner: Builder, iteration: Tensor, condition: Tensor, state: Tensor, scale: Tensor) -> Sequence[Tensor]:
            w, u = of(inner, weight, added)
            following = inner.op("Tanh", inner.op("MatMul", state, w))
            return condition, following, scale * 0.5, following * scale, u + scale

        scale = builder.scalar(1.0, h)
        rows = [row_like(builder, h), row_like(builder, added)]
        return loop(builder, integer(builder, trips), None, [h, scale], step, rows)

    return build


def torch_counted(trips: int) -> Any:
    def run(h: torch.Tensor, weight: torch.Tensor, added: torch.Tensor) -> Any:
        scale, rows, others = torch.ones((), dtype=h.dtype), [], []
        for _ in range(trips):
            following = torch.tanh(h @ weight)
            rows.append(following * scale)
            others.append(added + scale)
            h, scale = following, scale * 0.5
        return h * 1, scale, stacked(rows, h), stacked(others, added)

    return run


def until_large(builder: Builder, inputs: list[Any]) -> Any:
    """A while loop that the data end, with an integer state and a branch inside that depends on the iteration."""
    x, weight = inputs

    def step(inner: Builder, iteration: Tensor, condition: Tensor, state: Tensor, count: Tensor) -> Sequence[Tensor]:
        (w,) = of(inner, weight)
        number = inner.cast(iteration, x.dtype) + 1

        def even(innermost: Builder) -> Sequence[Tensor]:
            s, v, n = of(innermost, state, w, number)
            return [s * v * v + n]

        def odd(innermost: Builder) -> Sequence[Tensor]:
            s, v = of(innermost, state, w)
            return [s * innermost.op("Exp", v)]

        is_even = inner.op("Equal", inner.op("Mod", count, 2), 0)
        following = if_(inner, is_even, even, odd, [x])
        going = inner.op("Less", total(inner, following), 60.0)
        return going, following, count + 1

    return loop(builder, None, boolean(builder, True), [x, integer(builder, 0)], step)[0]


def torch_until_large(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    count = 0
    while True:
        x = x * weight * weight + count + 1 if count % 2 == 0 else x * torch.exp(weight)
        count += 1
        if x.sum() >= 60.0:
            return x


def loop_in_loop(builder: Builder, inputs: list[Any]) -> Any:
    x, weight, bias = inputs

    def outer(inner: Builder, iteration: Tensor, condition: Tensor, state: Tensor) -> Sequence[Tensor]:
        shifted = inner.op("Add", state, *of(inner, bias))

        def step(innermost: Builder, number: Tensor, going: Tensor, carried: Tensor) -> Sequence[Tensor]:
            w, s = of(innermost, weight, shifted)
            return going, innermost.op("Tanh", carried * w) + s * 0.5

        trips = inner.op("Add", iteration, 1)
        return condition, loop(inner, trips, None, [state], step)

    return loop(builder, integer(builder, 3), boolean(builder, True), [x], outer)


def torch_loop_in_loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    for trips in (1, 2, 3):
        shifted = x + bias
        for _ in range(trips):
            x = torch.tanh(x * weight) + shifted * 0.5
    return x


def passed_through(builder: Builder, inputs: list[Any]) -> Any:
    """A state that iterations return as it is, one that no gradient reaches, and one that nothing differentiated depends on."""
    x, weight = inputs

    def step(inner: Builder, iteration: Tensor, condition: Tensor, *states: Tensor) -> Sequence[Tensor]:
        product, same, floor, other = states
        rounded = inner.op("Floor", floor + product)
        return condition, product * same, same, rounded, other * 2, inner.op("Gather", same, iteration, axis=0)

    states = [x, weight, x, zeros_like(x)]
    rows = [row_like(builder, builder.scalar(0.0, x))]
    results = loop(builder, integer(builder, 2), boolean(builder, True), states, step, rows)
    return results[0], results[1], results[4]


def torch_passed_through(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return x * weight * weight, weight * 1, weight[:2]


def loop_samples(rng: np.random.Generator) -> Any:
    for trips in (3, 1, 0):
        yield Sample(
            [normal(rng, 2, 3), normal(rng, 3, 3) * 0.5, normal(rng, 2)],
            name=f"counted{trips}",
            outputs=4,
            build=counted(trips),
            torch=torch_counted(trips),
        )
    yield Sample([np.abs(normal(rng, 3)), 1 + np.abs(normal(rng, 3))], name="while", build=until_large, torch=torch_until_large)
    yield Sample([normal(rng, 3), normal(rng, 3), normal(rng, 3)], name="nested", build=loop_in_loop, torch=torch_loop_in_loop)
    yield Sample(
        [normal(rng, 3), normal(rng, 3)],
        name="passed_through",
        outputs=3,
        build=passed_through,
        torch=torch_passed_through,
        constants=(),
        batched=(0, 1),
    )


# Scan


def recurrence(build_axes: dict[str, Sequence[int]], axis: int, row_axis: int) -> Any:
    """h = tanh(x[t] @ w + h * u), with h as a row and in the end."""

    def build(builder: Builder, inputs: list[Any]) -> Any:
        h, x, weight, scale = inputs

        def step(inner: Builder, state: Tensor, frame: Tensor) -> Sequence[Tensor]:
            w, u = of(inner, weight, scale)
            following = inner.op("Tanh", inner.op("MatMul", frame, w) + state * u)
            return following, following * following

        extent = None if x.shape is None else x.shape.dims[axis]
        return scan(builder, [h], [x], step, [row_like(builder, h, extent, row_axis)], **build_axes)  # type: ignore[arg-type]

    return build


def torch_recurrence(axis: int, row_axis: int, backwards: bool, rows_backwards: bool) -> Any:
    def run(h: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        frames, rows = list(x.unbind(axis)), []
        for frame in frames[::-1] if backwards else frames:
            h = torch.tanh(frame @ weight + h * scale)
            rows.append(h * h)
        return h * 1, torch.stack(rows[::-1] if rows_backwards else rows, row_axis)

    return run


def products(builder: Builder, inputs: list[Any]) -> Any:
    """No state; two inputs that are sliced along different axes; a third that nothing differentiates through."""
    x, y = inputs

    def step(inner: Builder, a: Tensor, b: Tensor) -> Sequence[Tensor]:
        return inner.op("Mul", a, b), inner.op("Sign", b)

    extent = None if x.shape is None else x.shape.dims[0]
    row = builder.tensor(ir.Value(name="row", type=x.value.type, shape=None if x.shape is None else ir.Shape(x.shape.dims[1:])))
    return scan(builder, [], [x, y], step, [row_like(builder, row, extent)] * 2, axes=(0, 1))[0]


def scan_samples(rng: np.random.Generator) -> Any:
    def inputs(*shape: int) -> list[np.ndarray]:
        return [normal(rng, 2, 3), normal(rng, *shape), normal(rng, 3, 3), normal(rng, 3)]

    yield Sample(
        inputs(4, 2, 3), name="forward", outputs=2, build=recurrence({}, 0, 0), torch=torch_recurrence(0, 0, False, False)
    )
    backwards: dict[str, Sequence[int]] = {"axes": (1,), "directions": (1,), "row_axes": (2,), "row_directions": (1,)}
    yield Sample(
        inputs(2, 4, 3),
        name="backward",
        outputs=2,
        build=recurrence(backwards, 1, 2),
        torch=torch_recurrence(1, 2, True, True),
        batched=(0, 1),
    )
    mixed: dict[str, Sequence[int]] = {"axes": (-1,), "row_axes": (-1,), "row_directions": (1,)}
    yield Sample(
        [normal(rng, 2), normal(rng, 2, 4), normal(rng, 2, 2), normal(rng, 2)],
        name="negative_axes",
        outputs=2,
        build=recurrence(mixed, -1, 1),
        torch=torch_recurrence(-1, -1, False, True),
        batched=(),
    )
    yield Sample([normal(rng, 3, 2), normal(rng, 2, 3)], name="stateless", build=products, torch=lambda x, y: x * y.T, batched=())


SPECS = [
    OperatorSpec("If", if_samples),
    OperatorSpec("Loop", loop_samples),
    OperatorSpec("Scan", scan_samples),
]
