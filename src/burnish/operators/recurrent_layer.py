"""Common parts of the recurrent layers: attributes, directions, layouts, sequence lengths, and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import SIXTEEN_BIT, Tensor, attribute_value, zeros_like
from burnish.graph.uses import is_used
from burnish.operators.positions import extent, joined
from burnish.operators.registry import Operation
from burnish.operators.semantic import Inference, Operands, OutputType

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
"""For each value of ``direction``, True for each direction that starts at the last frame."""


@dataclass(frozen=True)
class Direction:
    """One direction of a layer; T frames, N sequences, I features, G gates, H hidden units.

    Attributes:
        z: contribution of frames and biases to the gates, ``[T, N, G * H]``.
        r: recurrent weight, ``[G * H, H]``.
        recurrent_bias: ``[G * H]``, if it is separate from ``z``; otherwise None.
        initial: the initial states, ``[N, H]`` each; zeros by default.
        peepholes: ``[3 * H]``, or None.
        live: ``[T, N, 1]``, bool: True if frame t belongs to sequence n; None if all do.
        reverse: True if it starts at the last frame.
        activations: in lower case.
        hidden: H.
    """

    z: Tensor
    r: Tensor
    recurrent_bias: Tensor | None
    initial: tuple[Tensor, ...]
    peepholes: Tensor | None
    live: Tensor | None
    reverse: bool
    activations: tuple[str, ...]
    hidden: int


@dataclass(frozen=True)
class Recurrence:
    """A kind of recurrent layer.

    Attributes:
        gates: number of gates.
        states: positions of the inputs with initial states.
        peepholes: position of the input with peepholes, or None.
        default: the default activations.
        known: for each activation, the names with a gradient here, in lower case.
        keeps_biases_apart: True if the recurrent bias cannot be added to that of the input.
    """

    gates: int
    states: tuple[int, ...]
    peepholes: int | None
    default: tuple[str, ...]
    known: tuple[tuple[str, ...], ...]
    keeps_biases_apart: bool = False


def unsupported(op: Operation, kind: Recurrence) -> str | None:
    """Return why the layer has no gradient, and the remedy; None if it has one."""
    if op.attribute("clip") is not None:
        return (
            "has the attribute clip, whose gradient is not defined here: export the model without it, and clip gradients instead"
        )
    if op.attribute("input_forget", 0):
        return "has input_forget=1, whose gradient is not defined here: export the model with separate input and forget gates"
    if op.attribute("direction", "forward") not in DIRECTIONS:
        return (
            f"has direction='{op.attribute('direction')}', and the standard knows {', '.join(DIRECTIONS)}: export the model again"
        )
    chosen, count = _activations(op, kind), len(kind.default)
    expected = count * len(DIRECTIONS[op.attribute("direction", "forward")])
    if len(chosen) != expected:
        return f"names {len(chosen)} activations, and in these directions takes {expected}: export the model again"
    for index, activation in enumerate(chosen):
        known = kind.known[index % count]
        if activation not in known:
            names = " or ".join(name.capitalize() for name in known)
            return (
                f"has the activation '{activation}' where only {names} has a gradient here: "
                "write the layer out as a sequence of products, or choose that activation"
            )
    hidden, columns = _hidden_size(op), op.required(2).dimension(2)
    if hidden is not None and columns is not None and hidden != columns:
        return (
            f"has hidden_size={hidden}, and its recurrent weight '{op.required(2).name}' is for {columns}: export the model again"
        )
    if hidden is None:
        return f"has no hidden_size and its recurrent weight '{op.required(2).name}' no known shape: export it with the attribute"
    return None


def refused(op: Operation, kind: Recurrence) -> GradientError:
    return GradientError(f"{op} {unsupported(op, kind)}; or let nothing train that its output depends on")


def is_recurrent(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in ("GRU", "LSTM", "RNN")


def lacks_kernel(node: ir.Node) -> bool:
    """True if ONNX Runtime does not run this recurrent layer: batch first, or float64; it casts float16 itself."""
    if not is_recurrent(node):
        return False
    x = node.inputs[0]
    return attribute_value(node, "layout", 0) == 1 or (x is not None and x.dtype == ir.DataType.DOUBLE)


def recurrent_layer(
    op: Operation, kind: Recurrence, run: Callable[[Direction], tuple[Tensor, ...]]
) -> tuple[Tensor | None, ...] | None:
    """Emit a layer with ``run``, which emits one direction and returns h ``[T, N, H]`` and the last states ``[N, H]``.

    16-bit values are computed in float32: a state is a sum with one term per frame.

    Returns:
        A tensor for each output of the node, None if nothing reads it; None for a layer without a gradient.
    """
    if unsupported(op, kind) is not None:
        return None
    dtype = op.required(0).dtype
    directions = _directions(op, kind)
    results = [run(direction) for direction in directions]
    outputs: list[Tensor | None] = []
    batch_first = bool(op.attribute("layout", 0))
    for index, output in enumerate(op.outputs):
        if not is_used(output.value):
            outputs.append(None)
            continue
        parts = [result[index] for result in results]
        if index == 0:
            live = directions[0].live
            if live is not None:
                parts = [op.builder.op("Where", live, part, op.builder.scalar(0.0, part), like=part) for part in parts]
            stacked = _stacked(parts, 1)
            perm = [2, 0, 1, 3]
        else:
            lengths = op.optional(4)
            if lengths is not None:
                parts = [_of_sequences(part, lengths) for part in parts]
            stacked, perm = _stacked(parts, 0), [1, 0, 2]
        if batch_first:
            stacked = op.builder.op("Transpose", stacked, perm=perm)
        outputs.append(op.builder.cast(stacked, dtype))
    return tuple(outputs)


def _activations(op: Operation, kind: Recurrence) -> tuple[str, ...]:
    count = len(DIRECTIONS[op.attribute("direction", "forward")])
    chosen = op.attribute("activations") or kind.default * count
    return tuple((name.decode() if isinstance(name, bytes) else str(name)).lower() for name in chosen)


def _hidden_size(op: Operation) -> int | None:
    declared = op.attribute("hidden_size")
    return op.required(2).dimension(2) if declared is None else int(declared)


def _directions(op: Operation, kind: Recurrence) -> list[Direction]:
    builder = op.builder
    reverses = DIRECTIONS[op.attribute("direction", "forward")]
    count, hidden = len(reverses), _hidden_size(op)
    assert hidden is not None
    batch_first = bool(op.attribute("layout", 0))

    def read(index: int | None) -> Tensor | None:
        tensor = None if index is None else op.optional(index)
        if tensor is not None and tensor.shape is None and index in (0, *kind.states):
            tensor.value.shape = ir.Shape([None, None, None])  # ONNX Runtime needs the rank of values carried by a Scan
        if tensor is not None and tensor.dtype in SIXTEEN_BIT:
            tensor = builder.cast(tensor, ir.DataType.FLOAT)
        return tensor

    x = read(0)
    assert x is not None
    if batch_first:
        x = builder.op("Transpose", x, perm=[1, 0, 2])
    weights, recurrent = (_apart(read(index), count) for index in (1, 2))
    biases, peepholes = _apart(read(3), count), _apart(read(kind.peepholes), count)
    states = []
    for index in kind.states:
        state = read(index)
        if state is not None and batch_first:
            state = builder.op("Transpose", state, perm=[1, 0, 2])
        states.append(_apart(state, count))
    lengths = op.optional(4)
    live = None if lengths is None else _live(x, lengths)
    activations = _activations(op, kind)
    directions = []
    for index, reverse in enumerate(reverses):
        weight, r, bias = weights[index], recurrent[index], biases[index]
        assert weight is not None
        assert r is not None
        z = builder.op("MatMul", x, builder.op("Transpose", weight, perm=[1, 0]))
        recurrent_bias = None
        if bias is not None:
            of_input, recurrent_bias = builder.op("Split", bias, builder.integers([kind.gates * hidden] * 2), axis=0, outputs=2)
            if not kind.keeps_biases_apart:
                # One addition for all frames, and one sum over them in the gradient.
                of_input, recurrent_bias = of_input + recurrent_bias, None
            z = z + of_input
        z.value.shape = _shape(x, kind.gates * hidden)
        initial = tuple(_zeros(x, hidden) if (given := state[index]) is None else given for state in states)
        chosen = activations[index * len(kind.default) : (index + 1) * len(kind.default)]
        directions.append(Direction(z, r, recurrent_bias, initial, peepholes[index], live, reverse, chosen, hidden))
    return directions


def _apart(tensor: Tensor | None, count: int) -> list[Tensor | None]:
    """Split a tensor by its first axis, the directions, and remove that axis."""
    if tensor is None:
        return [None] * count
    builder, first = tensor.builder, tensor.builder.integers([0])
    if count == 1:
        return [builder.op("Squeeze", tensor, first)]
    parts = builder.op("Split", tensor, builder.integers([1] * count), axis=0, outputs=count)
    return [builder.op("Squeeze", part, first) for part in parts]


def _stacked(parts: Sequence[Tensor], axis: int) -> Tensor:
    builder = parts[0].builder
    wide = [builder.op("Unsqueeze", part, builder.integers([axis])) for part in parts]
    return wide[0] if len(wide) == 1 else builder.op("Concat", *wide, axis=axis)


def _live(x: Tensor, lengths: Tensor) -> Tensor:
    """Emit True if frame t belongs to sequence n: bool [T, N, 1]."""
    builder, index = x.builder, ir.DataType.INT64
    frames = builder.op("Squeeze", extent(x, 0), builder.integers([0]), shape=(), dtype=index)
    places = builder.op("Range", builder.scalar(0, index), frames, builder.scalar(1, index))
    column = builder.op("Unsqueeze", places, builder.integers([1, 2]))
    row = builder.op("Unsqueeze", builder.cast(lengths, index), builder.integers([0, 2]))
    return builder.op("Less", column, row, shape=_shape(x, 1))


def _of_sequences(state: Tensor, lengths: Tensor) -> Tensor:
    """Return a last state [N, H], and 0 for a sequence without frames: undefined in the standard, but so in ONNX Runtime."""
    builder = state.builder
    present = builder.op("Unsqueeze", builder.op("Greater", lengths, 0), builder.integers([1]))
    return builder.op("Where", present, state, builder.scalar(0.0, state), like=state)


def _zeros(x: Tensor, hidden: int) -> Tensor:
    builder = x.builder
    value = ir.tensor(np.zeros(1, x.dtype.numpy()))
    shape = joined(builder, [extent(x, 1), builder.integers([hidden])])
    batch = None if x.shape is None else ir.Shape([x.shape.dims[1], hidden])
    return builder.op("ConstantOfShape", shape, value=value, dtype=x.dtype, shape=batch)


def _shape(x: Tensor, last: int) -> ir.Shape | None:
    return None if x.shape is None else ir.Shape([*x.shape.dims[:2], last])


def hidden_states(*outputs: tuple[str, int]) -> Inference:
    """Return an inference: each output is like the named input, with a multiple of the hidden size as last extent."""

    def infer(operands: Operands) -> list[OutputType]:
        types = []
        for name, multiple in outputs:
            tensor = operands[name]
            last = multiple * operands.attributes["hidden_size"]
            shape = None if tensor.shape is None else ir.Shape([*tensor.shape.dims[:-1], last])
            types.append(OutputType(tensor.dtype, shape))
        return types

    return infer


def split(tensor: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return tensor.builder.op("Split", tensor, tensor.builder.integers(sizes), axis=-1, outputs=len(sizes))


def split_rows(matrix: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return matrix.builder.op("Split", matrix, matrix.builder.integers(sizes), axis=0, outputs=len(sizes))


def before(states: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """Return the state before each step: ``states`` [T, N, H] shifted by one, and ``initial`` [N, H] at the first step."""
    builder = states.builder
    first = builder.op("Unsqueeze", initial, builder.integers([0]))
    start, end = (1, 2**62) if reverse else (0, -1)
    others = builder.op("Slice", states, builder.integers([start]), builder.integers([end]), builder.integers([0]))
    return builder.op("Concat", *([others, first] if reverse else [first, others]), axis=0, like=states)


def weight_gradient(dz: Tensor, h: Tensor, like: Tensor | None = None) -> Tensor:
    """Emit dR = Σ dzᵀ·h over all frames and sequences: one product."""
    builder = dz.builder
    return builder.op("Gemm", builder.op("Flatten", dz, axis=2), builder.op("Flatten", h, axis=2), transA=1, like=like)


def given_or_zeros(cotangent: Tensor | None, like: Tensor) -> Tensor:
    """Return a cotangent, or zeros if nothing depends on its value."""
    return zeros_like(like) if cotangent is None else cotangent


def dead(live: Tensor, like: Tensor) -> Tensor:
    """Return 1 for each frame outside its sequence, otherwise 0."""
    return live.builder.cast(live.builder.op("Not", live), like.dtype)


def where_live(live: Tensor | None, tensor: Tensor, otherwise: float) -> Tensor:
    """Return the tensor for frames in their sequences, otherwise a number."""
    if live is None:
        return tensor
    return tensor.builder.op("Where", live, tensor, tensor.builder.scalar(otherwise, tensor), like=tensor)
