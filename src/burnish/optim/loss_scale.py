"""Loss scaling: gradients too small for sixteen bits are scaled up for the backward pass and down again afterwards.

The transform is the outermost: it gets the gradients after division by the scale, and hides steps with overflowing gradients from
the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, count, where
from burnish.optim.base import Transform, UpdateInputs
from burnish.optim.slots import Slot

LOSS_SCALE = Slot("loss_scale", per_parameter=False, of_method=False)
GOOD_STEPS = Slot("good_steps", per_parameter=False, of_method=False)
SKIPPED_STEPS = Slot("skipped_steps", per_parameter=False, of_method=False)

SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest scale: gradients are divided by it."""


@dataclass(frozen=True)
class LossScaled(Transform):
    """An optimizer for gradients of a scaled loss, the mathematics of ``torch.amp.GradScaler``.

    The loss is multiplied by the scale s before differentiation, and the gradients, in float32, are divided by it. With these
    gradients g::

        any of g infinite or NaN:  parameters and optimizer state stay, skipped_steps += 1, good_steps = 0, s = s * backoff_factor
        otherwise:                 the optimizer's update, good_steps += 1,
                                   and after growth_interval good steps in a row s = s * growth_factor, good_steps = 0

    s grows only while it stays finite. Source of the method: Micikevicius et al., "Mixed precision training", 2018. State, in
    addition to the optimizer's: ``loss_scale`` (float32), ``good_steps`` and ``skipped_steps`` (int64), scalars.

    Attributes:
        optimizer: the optimizer that updates the parameters.
        initial: scale of the first step.
        growth_factor, backoff_factor: factors of the scale.
        growth_interval: number of good steps in a row before the scale grows; None for a constant scale. Steps with overflowing
            gradients are skipped in any case.
    """

    slots = (LOSS_SCALE, GOOD_STEPS, SKIPPED_STEPS)
    initial: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | None = 2000

    @property
    def name(self) -> str:
        return self.optimizer.name

    def options(self) -> dict[str, Any]:
        """Return the options of the optimizer; those of the scale belong to the precision."""
        return self.optimizer.options()

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        zero, scale = count(builder, 0), builder.scalar(self.initial, ir.DataType.FLOAT)
        return self.optimizer.init(builder, params) | {LOSS_SCALE: scale, GOOD_STEPS: zero, SKIPPED_STEPS: zero}

    def apply(self, inputs: UpdateInputs) -> tuple[Tensors, Tensors]:
        finite = all_finite(inputs.builder, inputs.gradients) if inputs.finite is None else inputs.finite
        kept = {name: tensor for name, tensor in inputs.state.items() if name not in self.slots}
        new_params, new_state = self.optimizer.apply(replace(inputs, state=kept))
        next_params = {name: where(finite, new, inputs.params[name]) for name, new in new_params.items()}
        next_state = {name: where(finite, new, kept[name]) for name, new in new_state.items()}
        return next_params, next_state | self._next_scale(finite, inputs.state)

    def _next_scale(self, finite: Tensor, state: Mapping[str, Tensor]) -> Tensors:
        scale, good, skipped = state[LOSS_SCALE], state[GOOD_STEPS], state[SKIPPED_STEPS]
        builder = scale.builder
        counted: Tensors = {SKIPPED_STEPS: where(finite, skipped, skipped + 1)}
        if self.growth_interval is None:
            return counted | {
                LOSS_SCALE: builder.op("Identity", scale),
                GOOD_STEPS: where(finite, good + 1, builder.scalar(0, good)),
            }
        grown = scale * self.growth_factor
        can_grow = builder.op("Less", grown, builder.scalar(np.inf, grown))
        due = builder.op("GreaterOrEqual", good + 1, builder.scalar(self.growth_interval, good))
        raised = where(builder.op("And", due, can_grow), grown, scale)
        lowered = builder.op("Max", scale * self.backoff_factor, builder.scalar(SMALLEST, scale), like=scale)
        starts_again = builder.op("Or", due, builder.op("Not", finite))
        return counted | {
            LOSS_SCALE: where(finite, raised, lowered),
            GOOD_STEPS: where(starts_again, builder.scalar(0, good), good + 1),
        }


def all_finite(builder: Builder, gradients: Mapping[str, Tensor], joined: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Emit True if no gradient holds an infinity or NaN: a boolean scalar.

    A finite number times 0 is 0, and an infinity or NaN times 0 is NaN, as is every sum with it; nothing here can overflow.

    Args:
        builder: builder of the graph.
        gradients: floating-point gradients.
        joined: function that emits the sum over the workers of a scalar, which is 0, or NaN if a gradient is not finite.
    """
    sums = [builder.cast(builder.op("ReduceSum", gradient * 0, keepdims=0), ir.DataType.FLOAT) for gradient in gradients.values()]
    total = sums[0] if len(sums) == 1 else builder.op("Sum", *sums, like=sums[0])
    return builder.op("Equal", total if joined is None else joined(total), 0)
