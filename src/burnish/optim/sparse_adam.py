"""SparseAdam: Adam for embedding tables of which a step reads a few rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT
from burnish.optim.base import (
    Rate,
    RatedOptimizer,
    RowForm,
    Scalars,
    Tensors,
    check_betas,
    check_not_negative,
    check_rate,
    power,
)


@dataclass(frozen=True)
class SparseAdam(RatedOptimizer):
    """Adam in the form of ``torch.optim.SparseAdam``, made for ``burnish.compile(sparse=...)``.

    With parameter p, gradient g, moments m and v, and t = step + 1, in the rows that have a gradient::

        m = m + (1 - beta1) * (g - m)
        v = v + (1 - beta2) * (g² - v)
        p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    Where a program keeps the gradient of a table as rows, the others stay as they are, moments too: that is what PyTorch calls
    lazy. t counts the steps, not those that read a row. A parameter whose gradient is dense moves as a whole. Beside ``Adam`` eps
    is added to a root that is not corrected. State: ``first_moment/<initializer>`` and ``second_moment/<initializer>``, of the
    parameter's dtype and shape (PyTorch's ``exp_avg``, ``exp_avg_sq``).
    """

    name = "sparse_adam"
    slots = (FIRST_MOMENT, SECOND_MOMENT)
    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_rate(self.name, self.lr)
        check_not_negative(self.name, eps=self.eps)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

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
        t = scalars.double(step) + 1.0
        root = builder.op("Sqrt", 1.0 - power(builder, beta2, t))
        rate = scalars.double(lr) * root / (1.0 - power(builder, beta1, t))
        next_params: Tensors = {}
        for name, parameter in params.items():
            gradient = gradients[name]
            first, second = state[f"{FIRST_MOMENT}/{name}"], state[f"{SECOND_MOMENT}/{name}"]
            first = next_state[f"{FIRST_MOMENT}/{name}"] = first + (gradient - first) * (1.0 - beta1)
            second = next_state[f"{SECOND_MOMENT}/{name}"] = second + (gradient * gradient - second) * (1.0 - beta2)
            direction = first / (builder.op("Sqrt", second) + scalars.epsilon(self.eps, parameter))
            next_params[name] = parameter - direction * scalars.of(rate, parameter)
        return next_params, next_state


def sparse_adam(lr: Rate = 1e-3, betas: tuple[float, ...] = (0.9, 0.999), eps: float = 1e-8) -> SparseAdam:
    """Return SparseAdam; see ``SparseAdam`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return SparseAdam(lr, betas, eps)
