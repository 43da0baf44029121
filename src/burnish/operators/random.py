"""Random operators of the standard. ``burnish.random`` draws masks from a key for training programs."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.registry import Operation, Operator, Precision, alike


def drawn(op: Operation, dy: Tensor) -> None:
    """No gradient: draws are constant between jumps, or read only the shape of the input."""
    return


def dropout(op: Operation, dy: Tensor | None, d_mask: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradient through the mask that the node itself drew: dy * mask / (1 - ratio); dy outside training.

    Outside training nothing depends on the ratio. In training the mask jumps with it, so it has no gradient.
    """
    builder = op.builder
    training = op.optional(2)
    if dy is None or training is None or (training.array is not None and not bool(training.array.reshape(()))):
        return dy, None, None
    if op.wants(1):
        raise GradientError(f"{op}: a mask that is drawn has no derivative by its ratio. Differentiate by other values")
    ratio = op.optional(1)
    known = 0.5 if ratio is None else None if ratio.array is None else float(ratio.array.reshape(()))
    scale: Tensor | float
    if known is not None and training.array is not None:
        scale = 1.0 / (1.0 - known) if known < 1.0 else 0.0
    else:
        scale = _scale(ratio, known, training, dy)
    mask = builder.cast(op.second_output(ir.DataType.BOOL, op.input), dy.dtype)
    return builder.op("Mul", dy, mask * scale, like=op.input), None, None


def _scale(ratio: Tensor | None, known: float | None, training: Tensor, dy: Tensor) -> Tensor:
    """Emit a scalar: 1 / (1 - ratio) in training, 0 if nothing is kept, 1 outside training."""
    builder = dy.builder
    one, zero = builder.scalar(1.0, dy), builder.scalar(0.0, dy)
    if known is not None:
        factor = builder.scalar(1.0 / (1.0 - known) if known < 1.0 else 0.0, dy)
    else:
        assert ratio is not None
        rest = one - builder.op("Reshape", builder.cast(ratio, dy.dtype), builder.integers([]))
        nothing = builder.op("LessOrEqual", rest, zero)
        factor = builder.op("Where", nothing, zero, one / builder.op("Where", nothing, one, rest))
    return builder.op("Where", builder.op("Reshape", training, builder.integers([])), factor, one)


OPERATORS = [
    *alike(
        "Bernoulli",
        "RandomNormalLike",
        "RandomUniformLike",
        gradient=drawn,
        axes=axis_rules.like_first,
        reopen=reopen_rules.unary,
    ),
    Operator(
        "Dropout", since=12, gradient=dropout, axes=axis_rules.dropout, precision=Precision.FOLLOWS, reopen=reopen_rules.unary
    ),
    Operator("RandomNormal", axes=axis_rules.drawn),
    Operator("RandomUniform", axes=axis_rules.drawn),
    Operator("Multinomial", axes=axis_rules.multinomial),
]
