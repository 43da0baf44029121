"""NAdam: Adam with Nesterov's momentum, whose share of the past grows from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

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
from burnish.optim.slots import Slot

MOMENTUM_PRODUCT = Slot("momentum_product", per_parameter=False)
WARM_UP_BASE = 0.96


@dataclass(frozen=True)
class NAdam(RatedOptimizer):
    """NAdam, the mathematics of ``torch.optim.NAdam``.

    With parameter p, gradient g, moments m and v, product π (1 at the start), and t = step + 1::

        g    = g + weight_decay * p                      or, decoupled, p = (1 - lr * weight_decay) * p
        μ(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)
        π    = π * μ(t)
        m    = beta1 * m + (1 - beta1) * g
        v    = beta2 * v + (1 - beta2) * g²
        p    = p - lr * (μ(t + 1) / (1 - π * μ(t + 1)) * m + (1 - μ(t)) / (1 - π) * g) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: Dozat, "Incorporating Nesterov momentum into Adam", 2016. Computed in the equivalent form where the factor of g is
    part of the rate, and the correction of v is a scalar.
    State: ``first_moment/<initializer>`` and ``second_moment/<initializer>``, of the parameter's dtype and shape, and the
    float64 scalar ``momentum_product`` (PyTorch's ``exp_avg``, ``exp_avg_sq``, ``mu_product``).
    """

    name = "nadam"
    slots = (FIRST_MOMENT, SECOND_MOMENT, MOMENTUM_PRODUCT)
    lr: Rate = 2e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    needs: ClassVar = {"decoupled_weight_decay": "weight_decay"}

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay, momentum_decay=self.momentum_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return super().init(builder, params) | {MOMENTUM_PRODUCT: builder.scalar(1.0, ir.DataType.DOUBLE)}

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
        now, following = self._momentum(builder, t), self._momentum(builder, t + 1.0)
        product = next_state[MOMENTUM_PRODUCT] = state[MOMENTUM_PRODUCT] * now
        of_gradient = (1.0 - now) / (1.0 - product)
        of_moment = following / (1.0 - product * following) / of_gradient
        root = builder.op("Sqrt", 1.0 - power(builder, beta2, t))
        rate = lr * root * of_gradient
        decoupled = self.weight_decay > 0.0 and self.decoupled_weight_decay
        keep = 1.0 - lr * self.weight_decay if decoupled else None
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = gradients[name] if decoupled else penalized(gradients[name], parameter, self.weight_decay)
            first = state[f"{FIRST_MOMENT}/{name}"] * beta1 + gradient * (1.0 - beta1)
            second = state[f"{SECOND_MOMENT}/{name}"] * beta2 + gradient * gradient * (1.0 - beta2)
            next_state[f"{FIRST_MOMENT}/{name}"] = first
            next_state[f"{SECOND_MOMENT}/{name}"] = second
            ahead = gradient + first * scalars.of(of_moment, parameter)
            direction = ahead / (builder.op("Sqrt", second) + scalars.epsilon(self.eps, parameter, root))
            if keep is not None:
                parameter = parameter * scalars.of(keep, parameter)
            next_params[name] = parameter - direction * scalars.of(rate, parameter)
        return next_params, next_state

    def _momentum(self, builder: Builder, t: Tensor) -> Tensor:
        """Emit μ(t), a float64 scalar."""
        return self.betas[0] * (1.0 - 0.5 * power(builder, WARM_UP_BASE, t * self.momentum_decay))


def nadam(
    lr: Rate = 2e-3,
    betas: tuple[float, ...] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> NAdam:
    """Return NAdam; see ``NAdam`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient.
        momentum_decay: how fast the momentum grows from half of ``betas[0]`` to the whole.
        decoupled_weight_decay: take ``lr * weight_decay`` of the weight off instead of adding to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return NAdam(lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay)
