"""Adamax: Adam with the largest recent gradient instead of the second moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.adam import FIRST_MOMENT
from burnish.optim.arithmetic import double, epsilon, penalized, stepped
from burnish.optim.base import Rate, RatedOptimizer, check_betas
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

LARGEST_GRADIENT = Slot("largest_gradient")


@dataclass(frozen=True)
class Adamax(RatedOptimizer):
    """Adamax, the mathematics of ``torch.optim.Adamax``.

    With parameter p, gradient g, first moment m, infinity norm u, and t = step + 1::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        u = max(beta2 * u, |g| + eps)
        p = p - lr / (1 - beta1^t) * m / u

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, section 7.1, with PyTorch's eps.
    State, in the parameter's dtype and shape: ``first_moment/<initializer>``, ``largest_gradient/<initializer>`` (PyTorch's
    ``exp_avg``, ``exp_inf``).

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first moment and of the largest gradient, each in [0, 1).
        eps: added to the size of every gradient.
        weight_decay: L2 penalty, added to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "adamax"
    slots = (FIRST_MOMENT, LARGEST_GRADIENT)
    lr: Rate = 2e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        builder = parameter.builder
        beta1, beta2 = self.betas
        rate = double(rate) / (1.0 - beta1 ** (double(step) + 1.0))
        gradient = penalized(gradient, parameter, self.weight_decay)
        first = slots[FIRST_MOMENT] * beta1 + gradient * (1.0 - beta1)
        size = builder.op("Abs", gradient) + epsilon(self.eps, parameter)
        largest = builder.op("Max", slots[LARGEST_GRADIENT] * beta2, size)
        return stepped(parameter, first / largest, rate), {FIRST_MOMENT: first, LARGEST_GRADIENT: largest}


adamax = Adamax
