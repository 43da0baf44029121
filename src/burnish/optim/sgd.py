"""Stochastic gradient descent, with momentum, dampening, Nesterov momentum and weight decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.optim.arithmetic import cast_like, number, penalized, stepped
from burnish.optim.base import Rate, RatedOptimizer, RowForm
from burnish.optim.slots import Slot
from burnish.validation import check_finite, check_not_negative

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
    initialization and momentum in deep learning", 2013, with lr multiplying the whole velocity.
    State: ``momentum/<initializer>``, in the parameter's dtype and shape (PyTorch's ``momentum_buffer``).

    Args:
        lr: learning rate, or a schedule.
        momentum: decay factor of the buffer.
        dampening: share of the gradient left out of the buffer.
        nesterov: True to look ahead along the buffer; needs momentum, and no dampening.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or nesterov without momentum.
    """

    name = "sgd"
    lr: Rate = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    needs: ClassVar = {"dampening": "momentum"}

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        gain = self._gain(step) if self.momentum and self.dampening else None
        gradient = penalized(gradient, parameter, self.weight_decay)
        if not self.momentum:
            return stepped(parameter, gradient, rate), {}
        added = gradient if gain is None else gradient * cast_like(gain, parameter)
        velocity = slots[MOMENTUM] * self.momentum + added
        direction = gradient + velocity * self.momentum if self.nesterov else velocity
        return stepped(parameter, direction, rate), {MOMENTUM: velocity}

    def _gain(self, step: Tensor) -> Tensor:
        """Emit the factor of the gradient: 1 at the first step, 1 - dampening afterwards; float64 scalar.

        The buffer starts at zero, so only dampening makes the first step different.
        """
        builder = step.builder
        first = builder.op("Equal", step, 0)
        later = number(builder, 1.0 - self.dampening)
        return builder.op("Where", first, number(builder, 1.0), later)


sgd = SGD
