"""Adagrad: every element has a rate of its own, which falls with the squares of its gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor, full_like
from burnish.optim.base import Rate, RatedOptimizer, RowForm, Scalars, Tensors, check_not_negative, check_rate, penalized
from burnish.optim.slots import Slot

SUM_OF_SQUARES = Slot("sum_of_squares")


@dataclass(frozen=True)
class Adagrad(RatedOptimizer):
    """Adagrad, the mathematics of ``torch.optim.Adagrad``.

    With parameter p, gradient g, and the sum of squares s, which starts at initial_accumulator_value::

        g = g + weight_decay * p
        s = s + g²
        p = p - lr / (1 + step * lr_decay) * g / (sqrt(s) + eps)

    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", 2011.
    State: ``sum_of_squares/<initializer>``, of the parameter's dtype and shape (PyTorch's ``sum``).
    """

    name = "adagrad"
    slots = (SUM_OF_SQUARES,)
    lr: Rate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(
            self.name,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            initial_accumulator_value=self.initial_accumulator_value,
            eps=self.eps,
        )

    @property
    def row_form(self) -> RowForm:
        return "lazy" if self.weight_decay else "exact"

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return self.rate_state(builder) | {
            f"{SUM_OF_SQUARES}/{name}": full_like(parameter, self.initial_accumulator_value) for name, parameter in params.items()
        }

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
        if self.lr_decay:
            lr = scalars.double(lr) / (scalars.double(step) * self.lr_decay + 1.0)
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = penalized(gradients[name], parameter, self.weight_decay)
            slot = f"{SUM_OF_SQUARES}/{name}"
            total = next_state[slot] = state[slot] + gradient * gradient
            direction = gradient / (builder.op("Sqrt", total) + scalars.epsilon(self.eps, parameter))
            next_params[name] = parameter - direction * scalars.of(lr, parameter)
        return next_params, next_state


def adagrad(
    lr: Rate = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Adagrad:
    """Return Adagrad; see ``Adagrad`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        lr_decay: how much the divisor of the rate grows by with every step.
        weight_decay: L2 penalty, added to the gradient.
        initial_accumulator_value: where the sums of squares start.
        eps: added to the root of the sum of squares.

    Raises:
        ConfigurationError: a negative or non-finite number.
    """
    return Adagrad(lr, lr_decay, weight_decay, initial_accumulator_value, eps)
