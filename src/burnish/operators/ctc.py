"""The likelihood of a label sequence over all alignments with frames: the recursion of the CTC loss.

``AlignmentLikelihood(emission, may_skip, is_live, is_final) -> likelihood, forward`` is a semantic operator:

- emission ``[T, N, L]``: log-probability of state s at frame t; states go blank, label, blank, label, ..., blank;
- may_skip ``[N, L]``, bool: True if state s may follow s - 2 directly;
- is_live ``[T, N, 1]``, bool: True if frame t belongs to sequence n; is_final ``[N, L]``, bool: True if an alignment may end
  in the state;
- likelihood ``[N]``: logarithm of the sum over all alignments, about -1e30 if there is none; forward ``[T, N, L]``: the
  logarithms of the forward variables.

Graves et al. 2006, "Connectionist Temporal Classification", equations 5 to 11 and 13 to 15, with logarithms instead of scaling.
A Scan has no gradient rule here, so the gradient is a separate operator: the forward-backward algorithm.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like
from burnish.operators.time_loop import Tensors, scan

NEVER = -1e30
"""The logarithm of a probability of 0: finite, so that no difference of two is NaN, and smaller than any real one."""


def _likelihood_and_forward(operands: Operands) -> list[OutputType]:
    emission = operands["emission"]
    batch = None if emission.shape is None else ir.Shape([emission.shape.dims[1]])
    return [OutputType(emission.dtype, batch), OutputType.of(emission)]


def alignment_likelihood(op: Operation, dy: Tensor | None, d_forward: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """d likelihood / d emission is the probability of state s at frame t, given that the alignment spells the labels."""
    assert dy is not None
    assert d_forward is None, "the forward variables are there for the gradient only"
    inputs = [op.required(index) for index in range(4)]
    return ALIGNMENT_LIKELIHOOD_GRAD(dy, *inputs, *op.outputs), None, None, None


def lower_alignment_likelihood(op: Operation) -> tuple[Tensor, Tensor]:
    emission, may_skip, is_live, is_final = (op.required(index) for index in range(4))
    builder = op.builder

    def advance(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (state,), (emitted, live) = states, frames
        padded = inner.op("Pad", state, inner.integers([0, 2, 0, 0]), inner.scalar(NEVER, state))
        before, skipped = _columns(padded, 1, -1), _columns(padded, 0, -2)
        reached = _log_sum(state, before, inner.op("Where", may_skip, skipped, inner.scalar(NEVER, state), like=state))
        following = inner.op("Where", live, reached + emitted, state, like=state)
        return [following], [following]

    never = builder.scalar(NEVER, emission)
    is_first = builder.op("And", _is_first_column(is_final), builder.op("Equal", is_final, is_final))
    start = builder.op("Where", is_first, builder.scalar(0.0, emission), never)
    (last,), (forward,) = scan(builder, advance, [start], [emission, is_live], name=op.output.name)
    ends = builder.op("Where", is_final, last, builder.scalar(NEVER, last), like=last)
    axis = builder.integers([1])
    largest = builder.op("ReduceMax", ends, axis, keepdims=1)
    total = builder.op("ReduceSum", builder.op("Exp", ends - largest), axis, keepdims=0)
    return builder.op("Squeeze", largest, axis) + builder.op("Log", total), forward


def lower_alignment_likelihood_grad(op: Operation) -> Tensor:
    dy, emission, may_skip, is_live, is_final, likelihood, forward = (op.required(index) for index in range(7))
    builder = op.builder

    def retreat(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (state,), (emitted, live) = states, frames
        never = inner.scalar(NEVER, state)
        through = state + emitted
        pads = inner.integers([0, 0, 0, 2])
        after = _columns(inner.op("Pad", through, pads, never), 1, -1)
        skipping = _columns(inner.op("Pad", inner.op("Where", may_skip, through, never, like=state), pads, never), 2, None)
        return [inner.op("Where", live, _log_sum(through, after, skipping), state, like=state)], [state]

    zero = builder.scalar(0.0, emission)
    start = builder.op("Where", is_final, zero, builder.scalar(NEVER, emission))
    _, (backward,) = scan(builder, retreat, [start], [emission, is_live], reverse=True, name=op.output.name)
    wide = builder.op("Unsqueeze", likelihood, builder.integers([0, 2]))
    is_possible = builder.op("And", builder.op("Greater", wide, NEVER / 2), is_live)
    exponent = builder.op("Where", is_possible, forward + backward - wide, builder.scalar(NEVER, emission), like=emission)
    return builder.op("Mul", builder.op("Exp", exponent), builder.op("Unsqueeze", dy, builder.integers([0, 2])), like=emission)


def _log_sum(*terms: Tensor) -> Tensor:
    builder = terms[0].builder
    largest = builder.op("Max", *terms)
    total = builder.op("Exp", terms[0] - largest)
    for term in terms[1:]:
        total = total + builder.op("Exp", term - largest)
    return largest + builder.op("Log", total)


def _columns(tensor: Tensor, start: int, end: int | None) -> Tensor:
    builder = tensor.builder
    stop = builder.integers([2**62 if end is None else end])
    return builder.op("Slice", tensor, builder.integers([start]), stop, builder.integers([1]))


def _is_first_column(tensor: Tensor) -> Tensor:
    builder = tensor.builder
    zero, one = builder.scalar(0, ir.DataType.INT64), builder.scalar(1, ir.DataType.INT64)
    extent = builder.op("Squeeze", builder.op("Shape", tensor, start=1, end=2), builder.integers([0]), shape=())
    return builder.op("Equal", builder.op("Range", zero, extent, one), zero)


ALIGNMENT_LIKELIHOOD = SemanticOperator(
    "AlignmentLikelihood",
    ("emission", "may_skip", "is_live", "is_final"),
    ("likelihood", "forward"),
    _likelihood_and_forward,
    gradient=alignment_likelihood,
    lowering=lower_alignment_likelihood,
)
ALIGNMENT_LIKELIHOOD_GRAD = SemanticOperator(
    "AlignmentLikelihoodGrad",
    ("dy", "emission", "may_skip", "is_live", "is_final", "likelihood", "forward"),
    ("d_emission",),
    like("emission"),
    lowering=lower_alignment_likelihood_grad,
)

OPERATORS = [ALIGNMENT_LIKELIHOOD, ALIGNMENT_LIKELIHOOD_GRAD]
