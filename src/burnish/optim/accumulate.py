"""Gradient accumulation: one update from the gradients of several micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.collectives import ALL_REDUCE_WHERE
from burnish.optim.arithmetic import Tensors, cast_like, count, where, zero_slots
from burnish.optim.base import Optimizer, Transform, UpdateInputs, check_once, layers_of
from burnish.optim.slots import Slot
from burnish.validation import check_count

ACCUMULATED = Slot("accumulated_gradient", is_partial=True, of_method=False)
COUNT = Slot("accumulated_count", per_parameter=False, of_method=False)
WEIGHT = Slot("accumulated_weight", per_parameter=False, of_method=False)
UPDATES = Slot("update_count", per_parameter=False, of_method=False)


LOSS_WEIGHT = "loss_weight"
"""Hyperparameter of an update: the divisor of the micro-batch's loss, a scalar."""


@dataclass(frozen=True)
class Accumulate(Transform):
    """An update at every ``every``-th step, by the mean of the gradients since the last one.

    For gradient g of the j-th micro-batch since the last update, j from 0, whose loss is a mean over w samples or tokens::

        W = W + w
        a = a + (g - a) / (W / w)                 the mean of the gradients so far, weighted by w
        p, state = update(p, a, state)            if j + 1 = every; then a = 0, W = 0 and j = 0

    Between updates the parameters and the inner optimizer's state do not change. Its step, which drives schedules and
    corrections, counts updates. The mean is the gradient of the combined batch if the loss of a sample does not depend on other
    samples (batch normalization uses the statistics of each micro-batch). A micro-batch without labels has no weight. If the loss
    is a sum, or divided by a constant, all micro-batches weigh the same, with j + 1 instead of W / w. Each worker keeps the mean
    of its own parts, and the update sums them over the workers: one exchange per ``every`` micro-batches.
    State: ``accumulated_gradient/<initializer>``, in the parameter's dtype and shape; the int64 scalars ``accumulated_count`` (j)
    and ``update_count``; and ``accumulated_weight`` (W), in the loss's dtype, if micro-batches are weighted.

    Attributes:
        every: number of micro-batches per update.
        weight_dtype: dtype of w, the hyperparameter ``loss_weight``; None for equal weights. It follows from the loss and is not
            an option.
    """

    name = "accumulate"
    slots = (ACCUMULATED, COUNT, WEIGHT, UPDATES)
    every: int = 1
    weight_dtype: ir.DataType | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.name, every=self.every)
        check_once(self, Accumulate)

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "weight_dtype"}

    @property
    def end(self) -> int | None:
        inside = super().end
        return None if inside is None else inside * self.every

    def rates(self, inputs: UpdateInputs) -> Tensors:
        return super().rates(replace(inputs, step=inputs.state[UPDATES]))

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        own = zero_slots(params, ACCUMULATED) | {COUNT: count(builder, 0), UPDATES: count(builder, 0)}
        if self.weight_dtype is not None:
            own[WEIGHT] = builder.scalar(0.0, self.weight_dtype)
        return self.optimizer.init(builder, params) | own

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        builder, state = inputs.builder, inputs.state
        number = state[COUNT] + 1
        is_last = builder.op("Equal", number, self.every)
        means: Tensors = {}
        hyperparameters = dict(inputs.hyperparameters)
        weight = hyperparameters.pop(LOSS_WEIGHT, None)
        share = number
        if weight is not None:
            total = state[WEIGHT] + weight
            one = builder.scalar(1.0, total)
            # For weight 0 this is infinite, so the micro-batch has no share; for equal weights it is exactly the count.
            share = where(builder.op("Equal", total, 0.0), one, total) / weight
        with builder.each_scalar_once():
            for name, gradient in inputs.gradients.items():
                mean = state[f"{ACCUMULATED}/{name}"]
                means[name] = mean + (gradient - mean) / cast_like(share, mean)
        whole = {name: ALL_REDUCE_WHERE(mean, is_last, parameter=name) for name, mean in means.items()}
        followed, inner = self.optimizer.apply(
            replace(inputs, gradients=whole, step=state[UPDATES], hyperparameters=hyperparameters)
        )
        next_params = {name: builder.op("Where", is_last, value, inputs.params[name]) for name, value in followed.items()}
        next_state = {key: builder.op("Where", is_last, value, state[key]) for key, value in inner.items()}
        for name, mean in means.items():
            next_state[f"{ACCUMULATED}/{name}"] = where(is_last, builder.scalar(0.0, mean), mean)
        if weight is not None:
            next_state[WEIGHT] = where(is_last, builder.scalar(0.0, total), total)
        next_state[COUNT] = builder.op("Where", is_last, builder.scalar(0, number), number)
        next_state[UPDATES] = builder.op("Where", is_last, state[UPDATES] + 1, state[UPDATES])
        return next_params, next_state


def weighing(optimizer: Optimizer, dtype: ir.DataType) -> Optimizer:
    """Return an optimizer whose accumulation weighs gradients by ``loss_weight``, a scalar of this dtype; others unchanged."""
    if isinstance(optimizer, Accumulate):
        return replace(optimizer, weight_dtype=dtype)
    inside = getattr(optimizer, "optimizer", None)
    return optimizer if inside is None else replace(optimizer, optimizer=weighing(inside, dtype))  # type: ignore[type-var]


def weighs(optimizer: Optimizer) -> bool:
    """True if ``weighing`` made an optimizer weigh gradients."""
    return any(isinstance(layer, Accumulate) and layer.weight_dtype is not None for layer in layers_of(optimizer))


def steps_to_an_update(options: Mapping[str, Any] | None) -> int:
    """Return the number of steps per update, from an optimizer's options."""
    steps = 1
    while options is not None:
        steps *= options["every"] if options.get("name") == Accumulate.name else 1
        options = options.get("optimizer")
    return steps


def accumulate(optimizer: Optimizer, every: int) -> Accumulate:
    """Return an optimizer that updates once in ``every`` steps; see ``Accumulate``.

    Args:
        optimizer: the optimizer that gets the mean gradient.
        every: number of micro-batches per update, at least 1.

    Raises:
        ConfigurationError: ``every`` is not a whole number of at least 1, or the optimizer already accumulates.
    """
    return Accumulate(optimizer, every)
