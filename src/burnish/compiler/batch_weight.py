"""What the loss of a batch is divided by. Weighed by it, gradients of micro-batches have the mean that one batch would have."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from burnish import optim
from burnish.compiler.worker_loss import reads
from burnish.errors import ObjectiveWarning
from burnish.graph import Tensor
from burnish.losses import Term
from burnish.optim.accumulate import steps_to_an_update
from burnish.warn import warn

WEIGHS_ALIKE = "weighs_alike"
"""The option of a program that says why an accumulation weighs micro-batches of any size alike."""


def weight_of_batch(terms: Sequence[Term], batch: Collection[ir.Value], lengths: int) -> Tensor | None:
    """Return what the terms of a loss are divided by, a scalar; None where it is a constant, and micro-batches weigh alike.

    What depends on no input, such as a penalty of the weights, is the same in each micro-batch and has no say.

    Args:
        terms: of the loss of a batch.
        batch: the inputs that a batch comes in.
        lengths: how many open extents these have. Where there is one, the batch, terms that are divided by numbers of elements
            are divided by multiples of one number.

    Raises:
        ValueError: the terms are divided by numbers that do not go together: no weight of a micro-batch is right for all.
    """
    weights: list[Tensor] = []
    is_summed = False
    for term in terms:
        constant = term.weight.array
        if constant is None:
            weights.append(term.weight)
        elif reads(term.total.value, batch):
            is_summed = True
    if not weights:
        return None
    first, *others = weights
    of_extents = lengths <= 1 and not any(reads(weight.value, batch) for weight in weights)
    if is_summed or not all(of_extents or _are_alike(first.value, other.value) for other in others):
        raise ValueError("its terms are divided by numbers that do not go together")
    return first


def warn_of_accumulation(optimizer: optim.Optimizer, reason: str) -> None:
    """Warn of an optimizer that accumulates where ``weight_of_batch`` gave a reason why its mean is not that of one batch."""
    if reason and steps_to_an_update(optimizer.options()) > 1:
        problem = (
            f"accumulate: micro-batches weigh alike, however many samples or labelled tokens they have, for the loss has no one "
            f"weight of a batch: {reason}. Give micro-batches of one size, or a loss whose terms are means over the same"
        )
        warn(ObjectiveWarning(problem))


def _are_alike(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether two values are computed alike from the same values."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    if one.const_value is not None and other.const_value is not None:
        left, right = one.const_value.numpy(), other.const_value.numpy()
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    left_node, right_node = one.producer(), other.producer()
    if left_node is None or right_node is None or one.index() != other.index():
        return False
    return (
        left_node.op_identifier() == right_node.op_identifier()
        and {name: str(value) for name, value in left_node.attributes.items()}
        == {name: str(value) for name, value in right_node.attributes.items()}
        and len(left_node.inputs) == len(right_node.inputs)
        and all(_are_alike(left, right) for left, right in zip(left_node.inputs, right_node.inputs, strict=True))
    )
