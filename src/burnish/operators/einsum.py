"""Einsum: sums of products over named axes."""

from __future__ import annotations

import string

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.axes import einsum_terms
from burnish.operators.positions import extent, joined
from burnish.operators.registry import Operation, Operator, Precision

LARGEST_CONSTANT = 4096
"""Rows of the largest constant identity matrix; a larger one is computed in the graph."""


def einsum(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of an operand: the contraction of the cotangent with the other operands, onto the operand's labels.

    A label that only this operand has was summed over: the gradient is repeated along it. A label that occurs twice in the
    operand takes a diagonal: the gradient is on the diagonal.
    """
    operands, output = _parse_equation(op)
    gradients: list[Tensor | None] = []
    for index, labels in enumerate(operands):
        if not op.wants(index):
            gradients.append(None)
            continue
        operand = op.required(index)
        others = [other for other in range(len(operands)) if other != index]
        present = set(output).union(*(operands[other] for other in others))
        distinct = "".join(dict.fromkeys(labels))
        kept = "".join(label for label in distinct if label in present)
        equation = ",".join([output, *(operands[other] for other in others)]) + "->" + kept
        contracted = op.builder.op("Einsum", dy, *(op.required(other) for other in others), equation=equation)
        alone = [axis for axis, label in enumerate(distinct) if label not in present]
        if alone:
            contracted = op.builder.op("Unsqueeze", contracted, op.builder.integers(alone))
            contracted = _repeated(contracted, operand, labels, distinct)
        gradients.append(_on_diagonals(contracted, operand, labels, distinct))
    return tuple(gradients)


def _repeated(tensor: Tensor, operand: Tensor, labels: str, distinct: str) -> Tensor:
    builder = tensor.builder
    if distinct == labels:
        return builder.op("Expand", tensor, builder.op("Shape", operand), like=operand)
    return builder.op("Expand", tensor, joined(builder, [extent(operand, labels.index(label)) for label in distinct]))


def _on_diagonals(tensor: Tensor, operand: Tensor, labels: str, distinct: str) -> Tensor:
    """Give a label as many axes as in the operand: the values on their diagonal, zeros elsewhere."""
    builder = tensor.builder
    present = distinct
    for position, label in enumerate(labels):
        if labels.index(label) == position:
            continue
        fresh = next(letter for letter in string.ascii_letters if letter not in present + labels)
        equation = f"{present},{label}{fresh}->{present}{fresh}"
        tensor = builder.op("Einsum", tensor, _identity(operand, position), equation=equation)
        present += fresh
        labels = labels[:position] + fresh + labels[position + 1 :]
    if present == labels:
        return tensor
    return builder.op("Transpose", tensor, perm=[present.index(label) for label in labels], like=operand)


def _identity(operand: Tensor, axis: int) -> Tensor:
    builder, size = operand.builder, operand.dimension(axis)
    if size is not None and size <= LARGEST_CONSTANT:
        return builder.constant(np.eye(size, dtype=operand.dtype.numpy()))
    square = builder.op("Expand", builder.scalar(0, operand), joined(builder, [extent(operand, axis)] * 2))
    return builder.op("EyeLike", square, shape=ir.Shape([None, None]), dtype=operand.dtype)


def _parse_equation(op: Operation) -> tuple[list[str], str]:
    """Return the labels of each operand and of the output, with letters instead of an ellipsis."""
    equation = str(op.attribute("equation")).replace(" ", "")
    operands, output = einsum_terms(equation)
    if any("..." in labels for labels in operands):
        ranks = [_ellipsis_rank(op, index, labels) for index, labels in enumerate(operands)]
        free = [letter for letter in string.ascii_letters if letter not in equation][: max(ranks)]
        # Axes under ellipses are broadcast: they are aligned at the last one.
        operands = [
            labels.replace("...", "".join(free[len(free) - rank :])) for labels, rank in zip(operands, ranks, strict=True)
        ]
        output = output.replace("...", "".join(free))
    return operands, output


def _ellipsis_rank(op: Operation, index: int, labels: str) -> int:
    if "..." not in labels:
        return 0
    rank = op.required(index).rank
    if rank is None:
        raise GradientError(
            f"{op}: the number of dimensions of its operand '{op.required(index).name}' is unknown, and the gradient of an "
            "Einsum with an ellipsis depends on it. Declare the shapes of the model's inputs (names for unknown extents are "
            "enough)"
        )
    return rank - len(labels.replace("...", ""))


OPERATORS = [
    Operator(
        "Einsum",
        gradient=einsum,
        axes=axis_rules.einsum,
        precision=Precision.NARROW,
        mixes=axis_rules.summed_by_einsum,
        reopen=reopen_rules.einsum,
    ),
]
