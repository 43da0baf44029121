"""Adadelta, which uses the size of recent updates instead of a learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import epsilon, penalized, sqrt, stepped
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.slots import Slot
from burnish.validation import check_fraction, check_not_negative

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

    Source: Zeiler, "ADADELTA: an adaptive learning rate method", 2012. Computed with a single root, of the quotient.
    State, in the parameter's dtype and shape: ``squared_gradient/<initializer>``, ``squared_update/<initializer>`` (PyTorch's
    ``square_avg``, ``acc_delta``).

    Args:
        lr: factor of the update, or a schedule.
        rho: decay factor of the mean squares, in [0, 1).
        eps: added to both mean squares; its root is the size of the first updates.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a rho outside [0, 1).
    """

    name = "adadelta"
    slots = (SQUARED_GRADIENT, SQUARED_UPDATE)
    lr: Rate = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.name, rho=self.rho)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        gradient = penalized(gradient, parameter, self.weight_decay)
        eps = epsilon(self.eps, parameter)
        squared = slots[SQUARED_GRADIENT] * self.rho + gradient * gradient * (1.0 - self.rho)
        direction = sqrt((slots[SQUARED_UPDATE] + eps) / (squared + eps)) * gradient
        updates = slots[SQUARED_UPDATE] * self.rho + direction * direction * (1.0 - self.rho)
        return stepped(parameter, direction, rate), {SQUARED_GRADIENT: squared, SQUARED_UPDATE: updates}


adadelta = Adadelta
