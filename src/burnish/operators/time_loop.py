"""Recursions over the leading axis of tensors, as a standard ``Scan``, and loops with a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from burnish.graph import Builder, Tensor

Tensors = Sequence[Tensor]
Step = Callable[[Builder, Tensors, Tensors], tuple[Tensors, Tensors]]


def scan(
    builder: Builder, step: Step, states: Tensors, frames: Tensors, *, reverse: bool = False, name: str
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Emit ``states, kept = step(inner, states, frames[t])`` for every t: in order, or with ``reverse`` from the last.

    Args:
        builder: emits the Scan.
        step: emits one iteration with the builder it gets; it may read tensors of the outer graph.
        states: the initial states; each keeps its dtype and shape.
        frames: tensors read slice by slice along axis 0; all of one extent.
        reverse: True to read the last slice first. Kept values of slice t are still at position t.
        name: prefix of the names inside the body, which must differ from those of the outer graph.

    Returns:
        The states after the last iteration; and the kept values of every slice, stacked along axis 0.
    """
    body = ir.Graph([], [], nodes=[], name=f"{name}/step", opset_imports=dict(builder.graph.opset_imports))
    inner = Builder(body)
    for index, (like, drop) in enumerate([*((state, 0) for state in states), *((frame, 1) for frame in frames)]):
        shape = None if like.shape is None else ir.Shape(like.shape.dims[drop:])
        body.inputs.append(ir.Value(name=f"{name}/in{index}", type=ir.TensorType(like.dtype), shape=shape))
    tensors = [inner.tensor(value) for value in body.inputs]
    following, rows = step(inner, tensors[: len(states)], tensors[len(states) :])
    for tensor in (*following, *rows):
        # Each output of a body must be a separate value: neither one of its inputs nor another output.
        taken = tensor.value.is_graph_input() or any(tensor.value is output for output in body.outputs)
        body.outputs.append(inner.op("Identity", tensor).value if taken else tensor.value)
    for index, value in enumerate(output for node in body for output in node.outputs):
        value.name = f"{name}/step{index}"
    # The standard's reference evaluator scans only forwards, so reversed inputs are flipped.
    ordered = [reversed_frames(frame) for frame in frames] if reverse else frames
    results = builder.op(
        "Scan", *states, *ordered, outputs=len(states) + len(rows), body=body, num_scan_inputs=len(frames), like=states[0]
    )
    results = results if isinstance(results, tuple) else (results,)
    for last, state in zip(results[: len(states)], states, strict=True):
        last.value.type, last.value.shape = state.value.type, None if state.shape is None else ir.Shape(state.shape.dims)
    stacked = results[len(states) :]
    extent = None if frames[0].shape is None else frames[0].shape.dims[0]
    for whole, slice_of_it in zip(stacked, rows, strict=True):
        dims = None if slice_of_it.shape is None or extent is None else (extent, *slice_of_it.shape.dims)
        whole.value.type, whole.value.shape = slice_of_it.value.type, None if dims is None else ir.Shape(dims)
    return results[: len(states)], tuple(reversed_frames(whole) if reverse else whole for whole in stacked)


def reversed_frames(tensor: Tensor) -> Tensor:
    builder = tensor.builder
    back = builder.integers([-1])
    return builder.op("Slice", tensor, back, builder.integers([-(2**62)]), builder.integers([0]), back, like=tensor)


def repeat_while(
    builder: Builder,
    step: Callable[[Builder, Tensors], tuple[Tensors, Tensor]],
    states: Tensors,
    condition: Tensor,
    limit: Tensor,
    *,
    name: str,
) -> tuple[Tensor, ...]:
    """Emit ``states, condition = step(inner, states)`` while the condition is true, as a standard ``Loop``.

    Args:
        builder: emits the Loop.
        step: emits one iteration with the builder it gets; it may read tensors of the outer graph.
        states: the initial states; each keeps its dtype and shape.
        condition: a bool scalar, true if there is a first iteration.
        limit: the most iterations, an int64 scalar.
        name: prefix of the names inside the body, which must differ from those of the outer graph.

    Returns:
        The states after the last iteration.
    """
    body = ir.Graph([], [], nodes=[], name=f"{name}/step", opset_imports=dict(builder.graph.opset_imports))
    inner = Builder(body)
    number = ir.Value(name=f"{name}/number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    going = ir.Value(name=f"{name}/going", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    body.inputs.extend([number, going])
    for index, state in enumerate(states):
        shape = None if state.shape is None else ir.Shape(state.shape.dims)
        body.inputs.append(ir.Value(name=f"{name}/in{index}", type=ir.TensorType(state.dtype), shape=shape))
    following, goes_on = step(inner, [inner.tensor(value) for value in body.inputs[2:]])
    for tensor in (goes_on, *following):
        taken = tensor.value.producer() not in body or any(tensor.value is output for output in body.outputs)
        body.outputs.append(inner.op("Identity", tensor).value if taken else tensor.value)
    for index, value in enumerate(output for node in body for output in node.outputs):
        value.name = f"{name}/step{index}"
    results = builder.op("Loop", limit, condition, *states, outputs=len(states), body=body)
    results = results if isinstance(results, tuple) else (results,)
    for last, state in zip(results, states, strict=True):
        last.value.type, last.value.shape = state.value.type, None if state.shape is None else ir.Shape(state.shape.dims)
    return results
