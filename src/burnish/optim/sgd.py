"""Stochastic gradient descent, with momentum, dampening, Nesterov's momentum and weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    RowForm,
    Scalars,
    Tensors,
    check_finite,
    check_not_negative,
    check_rate,
    penalized,
)
from burnish.optim.slots import Slot

MOMENTUM = Slot("momentum")


@dataclass(frozen=True)
class SGD(RatedOptimizer):
    """Stochastic gradient descent, the mathematics of ``torch.optim.SGD``.

    With parameter p, gradient g, momentum buffer v::

        g = g + weight_decay * p
        v = g                                        at the first step
        v = momentum * v + (1 - dampening) * g       afterwards
        p = p - lr * v                               or, with nesterov, p - lr * (g + momentum * v)

    Without momentum there is no buffer and p = p - lr * g. Source of the method: Sutskever et al., "On the importance of
    initialization and momentum in deep learning", 2013, in the form where lr multiplies the whole velocity.
    State: ``momentum/<initializer>``, of the parameter's dtype and shape (PyTorch's ``momentum_buffer``).
    """

    name = "sgd"
    lr: Rate = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    needs: ClassVar = {"dampening": "momentum"}

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, momentum=self.momentum, weight_decay=self.weight_decay)
        check_finite(self.name, dampening=self.dampening)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ConfigurationError(
                f"{self.name}: nesterov needs a momentum above 0 and no dampening, "
                f"not momentum {self.momentum} and dampening {self.dampening}"
            )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (MOMENTUM,) if self.momentum else ()

    @property
    def row_form(self) -> RowForm:
        return "lazy" if self.momentum or self.weight_decay else "exact"

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        scalars = Scalars(builder)
        lr, next_state = self.rate(builder, step, state, hyperparameters)
        # The buffer starts at zero, so that only dampening makes the first step another formula.
        gain = self._gain(builder, step) if self.momentum and self.dampening else None
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = penalized(gradients[name], parameter, self.weight_decay)
            direction = gradient
            if self.momentum:
                slot = f"{MOMENTUM}/{name}"
                added = gradient if gain is None else gradient * scalars.of(gain, parameter)
                velocity = state[slot] * self.momentum + added
                next_state[slot] = velocity
                direction = gradient + velocity * self.momentum if self.nesterov else velocity
            next_params[name] = parameter - direction * scalars.of(lr, parameter)
        return next_params, next_state

    def _gain(self, builder: Builder, step: Tensor) -> Tensor:
        """Emit the factor of the gradient: 1 at the first step, 1 - dampening afterwards; float64 scalar."""
        first = builder.op("Equal", step, 0)
        later = builder.scalar(1.0 - self.dampening, ir.DataType.DOUBLE)
        return builder.op("Where", first, builder.scalar(1.0, later), later)


def sgd(lr: Rate = 0.1, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> SGD:
    """Return stochastic gradient descent; see ``SGD`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        momentum: share of the buffer that is kept from step to step.
        dampening: share of the gradient that is left out of the buffer.
        nesterov: look ahead along the buffer; needs momentum, and no dampening.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or nesterov without momentum.
    """
    return SGD(lr, momentum, dampening, nesterov, weight_decay)
