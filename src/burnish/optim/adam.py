"""Adam, and the update it shares with AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    RowForm,
    Scalars,
    Tensors,
    check_betas,
    check_not_negative,
    check_rate,
    penalized,
    power,
)
from burnish.optim.slots import Slot

FIRST_MOMENT = Slot("first_moment")
SECOND_MOMENT = Slot("second_moment")
LARGEST_SECOND_MOMENT = Slot("largest_second_moment")


@dataclass(frozen=True)
class Adam(RatedOptimizer):
    """Adam, the mathematics of ``torch.optim.Adam``.

    With parameter p, gradient g, moments m and v, and t = step + 1::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    With amsgrad the root is taken of the largest v so far. Sources: Kingma and Ba, "Adam: a method for stochastic
    optimization", 2015; Reddi et al., "On the convergence of Adam and beyond", 2018. Computed in the equivalent form
    ``p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps * sqrt(1 - beta2^t))``, where all corrections are scalars.
    State, of the parameter's dtype and shape: ``first_moment/<initializer>``, ``second_moment/<initializer>`` and, with
    amsgrad, ``largest_second_moment/<initializer>`` (PyTorch's ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``).
    """

    name = "adam"
    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (FIRST_MOMENT, SECOND_MOMENT, *((LARGEST_SECOND_MOMENT,) if self.amsgrad else ()))

    @property
    def row_form(self) -> RowForm:
        return "lazy"

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
        beta1, beta2 = self.betas
        lr, next_state = self.rate(builder, step, state, hyperparameters)
        lr = scalars.double(lr)
        t = scalars.double(step) + 1.0
        root = builder.op("Sqrt", 1.0 - power(builder, beta2, t))
        rate = lr * root / (1.0 - power(builder, beta1, t))
        keep = self._keep(lr)
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = self._penalized(gradients[name], parameter)
            first = state[f"{FIRST_MOMENT}/{name}"] * beta1 + gradient * (1.0 - beta1)
            second = state[f"{SECOND_MOMENT}/{name}"] * beta2 + gradient * gradient * (1.0 - beta2)
            next_state[f"{FIRST_MOMENT}/{name}"] = first
            next_state[f"{SECOND_MOMENT}/{name}"] = second
            if self.amsgrad:
                slot = f"{LARGEST_SECOND_MOMENT}/{name}"
                second = next_state[slot] = builder.op("Max", state[slot], second)
            direction = first / (builder.op("Sqrt", second) + scalars.epsilon(self.eps, parameter, root))
            if keep is not None:
                parameter = parameter * scalars.of(keep, parameter)
            next_params[name] = parameter - direction * scalars.of(rate, parameter)
        return next_params, next_state

    def _penalized(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Emit the gradient with the penalty on the weights in it."""
        return penalized(gradient, parameter, self.weight_decay)

    def _keep(self, lr: Tensor) -> Tensor | None:
        """Emit the factor of the parameter where the decay acts on it directly; float64 scalar."""
        return None


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, ...] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> Adam:
    """Return Adam; see ``Adam`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient (for decay of the weight itself see ``adamw``).
        amsgrad: divide by the root of the largest second moment so far.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return Adam(lr, betas, eps, weight_decay, amsgrad)
