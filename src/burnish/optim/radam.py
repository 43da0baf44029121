"""RAdam: Adam that adapts the rate only once it has seen enough gradients to know their variance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Builder, Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    Scalars,
    Tensors,
    check_betas,
    check_not_negative,
    check_rate,
    penalized,
    power,
)

SHORTEST_AVERAGE = 5.0


@dataclass(frozen=True)
class RAdam(RatedOptimizer):
    """RAdam, the mathematics of ``torch.optim.RAdam``.

    With parameter p, gradient g, moments m and v, and t = step + 1::

        g = g + weight_decay * p                         or, decoupled, p = (1 - lr * weight_decay) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        ρ∞ = 2 / (1 - beta2) - 1
        ρ  = ρ∞ - 2 * t * beta2^t / (1 - beta2^t)
        p = p - lr * m / (1 - beta1^t) * a
        a = sqrt((ρ - 4) * (ρ - 2) * ρ∞ / ((ρ∞ - 4) * (ρ∞ - 2) * ρ)) * sqrt(1 - beta2^t) / (sqrt(v) + eps)   where ρ > 5
        a = 1                                                                                                elsewhere

    Source: Liu et al., "On the variance of the adaptive learning rate and beyond", 2020.
    State, of the parameter's dtype and shape: ``first_moment/<initializer>``, ``second_moment/<initializer>`` (PyTorch's
    ``exp_avg``, ``exp_avg_sq``).
    """

    name = "radam"
    slots = (FIRST_MOMENT, SECOND_MOMENT)
    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    needs: ClassVar = {"decoupled_weight_decay": "weight_decay"}

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

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
        lr = scalars.double(lr)
        t = scalars.double(step) + 1.0
        beta1, beta2 = self.betas
        rate = lr / (1.0 - power(builder, beta1, t))
        rectified = self._rectification(builder, t)
        if rectified is not None:
            adapts, factor = rectified
            rate = rate * factor
        decoupled = self.weight_decay > 0.0 and self.decoupled_weight_decay
        keep = 1.0 - lr * self.weight_decay if decoupled else None
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = gradients[name] if decoupled else penalized(gradients[name], parameter, self.weight_decay)
            first = state[f"{FIRST_MOMENT}/{name}"] * beta1 + gradient * (1.0 - beta1)
            second = state[f"{SECOND_MOMENT}/{name}"] * beta2 + gradient * gradient * (1.0 - beta2)
            next_state[f"{FIRST_MOMENT}/{name}"] = first
            next_state[f"{SECOND_MOMENT}/{name}"] = second
            direction = first
            if rectified is not None:
                deviation = builder.op("Sqrt", second) + scalars.epsilon(self.eps, parameter)
                direction = first / builder.op("Where", adapts, deviation, builder.scalar(1.0, parameter))
            if keep is not None:
                parameter = parameter * scalars.of(keep, parameter)
            next_params[name] = parameter - direction * scalars.of(rate, parameter)
        return next_params, next_state

    def _rectification(self, builder: Builder, t: Tensor) -> tuple[Tensor, Tensor] | None:
        """Emit whether the rate adapts at step t, and the factor of the rate: bool and float64 scalars.

        None where it never does, because even the longest average is too short.
        """
        beta2 = self.betas[1]
        longest = 2.0 / (1.0 - beta2) - 1.0
        if longest <= SHORTEST_AVERAGE:
            return None
        decayed = power(builder, beta2, t)
        left = 1.0 - decayed
        length = longest - 2.0 * t * decayed / left
        adapts = builder.op("Greater", length, SHORTEST_AVERAGE)
        share = (length - 4.0) * (length - 2.0) / length * (longest / ((longest - 4.0) * (longest - 2.0)))
        one = builder.scalar(1.0, t)
        # Selected before the root is taken: a shorter average would leave a negative number under it.
        return adapts, builder.op("Sqrt", builder.op("Where", adapts, share * left, one))


def radam(
    lr: Rate = 1e-3,
    betas: tuple[float, ...] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> RAdam:
    """Return RAdam; see ``RAdam`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient.
        decoupled_weight_decay: take ``lr * weight_decay`` of the weight off instead of adding to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return RAdam(lr, betas, eps, weight_decay, decoupled_weight_decay)
