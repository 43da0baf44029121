"""Adadelta: the size of the last updates takes the place of a learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    Scalars,
    Tensors,
    check_fraction,
    check_not_negative,
    check_rate,
    penalized,
)
from burnish.optim.slots import Slot

SQUARED_GRADIENT = Slot("squared_gradient")
SQUARED_UPDATE = Slot("squared_update")


@dataclass(frozen=True)
class Adadelta(RatedOptimizer):
    """Adadelta, the mathematics of ``torch.optim.Adadelta``.

    With parameter p, gradient g, mean squares of gradients v and of updates u::

        g = g + weight_decay * p
        v = rho * v + (1 - rho) * g²
        d = sqrt(u + eps) / sqrt(v + eps) * g
        u = rho * u + (1 - rho) * d²
        p = p - lr * d

    Source: Zeiler, "ADADELTA: an adaptive learning rate method", 2012. Computed with one root, of the quotient.
    State, of the parameter's dtype and shape: ``squared_gradient/<initializer>``, ``squared_update/<initializer>`` (PyTorch's
    ``square_avg``, ``acc_delta``).
    """

    name = "adadelta"
    slots = (SQUARED_GRADIENT, SQUARED_UPDATE)
    lr: Rate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_fraction(self.name, rho=self.rho)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)

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
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = penalized(gradients[name], parameter, self.weight_decay)
            gradient_slot, update_slot = f"{SQUARED_GRADIENT}/{name}", f"{SQUARED_UPDATE}/{name}"
            eps = scalars.epsilon(self.eps, parameter)
            squared = state[gradient_slot] * self.rho + gradient * gradient * (1.0 - self.rho)
            direction = builder.op("Sqrt", (state[update_slot] + eps) / (squared + eps)) * gradient
            next_state[gradient_slot] = squared
            next_state[update_slot] = state[update_slot] * self.rho + direction * direction * (1.0 - self.rho)
            next_params[name] = parameter - direction * scalars.of(lr, parameter)
        return next_params, next_state


def adadelta(lr: Rate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0) -> Adadelta:
    """Return Adadelta; see ``Adadelta`` for the mathematics.

    Args:
        lr: factor of the update, the default of the program's input ``lr``; or a schedule.
        rho: share of the mean squares that is kept from step to step, in [0, 1).
        eps: added to both mean squares; the root of it is the size of the first updates.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a rho outside [0, 1).
    """
    return Adadelta(lr, rho, eps, weight_decay)
