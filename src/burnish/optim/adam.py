"""Adam and AdamW, and the base of optimizers with two moments of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import double, epsilon, kept_share, penalized, sqrt, stepped
from burnish.optim.base import Rate, RatedOptimizer, check_betas
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

FIRST_MOMENT = Slot("first_moment")
SECOND_MOMENT = Slot("second_moment")
LARGEST_SECOND_MOMENT = Slot("largest_second_moment")


@dataclass(frozen=True)
class MomentOptimizer(RatedOptimizer):
    """Base of optimizers that keep a mean of the gradient and one of its square."""

    lr: Rate = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (FIRST_MOMENT, SECOND_MOMENT)

    def moments(self, gradient: Tensor, slots: Mapping[Slot, Tensor]) -> tuple[Tensor, Tensor]:
        """Emit the next moments: ``beta1 * m + (1 - beta1) * g`` and ``beta2 * v + (1 - beta2) * g²``."""
        beta1, beta2 = self.betas
        first = slots[FIRST_MOMENT] * beta1 + gradient * (1.0 - beta1)
        return first, slots[SECOND_MOMENT] * beta2 + gradient * gradient * (1.0 - beta2)

    def second_root(self, t: Tensor) -> Tensor:
        """Emit ``sqrt(1 - beta2^t)``, the bias of the second moment's root after t steps from zero."""
        return sqrt(1.0 - self.betas[1] ** t)


@dataclass(frozen=True)
class Adam(MomentOptimizer):
    """Adam, the mathematics of ``torch.optim.Adam``.

    With parameter p, gradient g, moments m and v, and t = step + 1::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        p = p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    With amsgrad, v under the root is the largest so far. Sources: Kingma and Ba, "Adam: a method for stochastic optimization",
    2015; Reddi et al., "On the convergence of Adam and beyond", 2018. Computed in the equivalent form ``p - lr * sqrt(1 -
    beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps * sqrt(1 - beta2^t))``, with scalar corrections.
    State, in the parameter's dtype and shape: ``first_moment/<initializer>``, ``second_moment/<initializer>`` and, with amsgrad,
    ``largest_second_moment/<initializer>`` (PyTorch's ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``).

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient (see ``adamw`` for decay of the weight itself).
        amsgrad: True to divide by the root of the largest second moment so far.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "adam"
    row_form = "lazy"
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*super().slots, *((LARGEST_SECOND_MOMENT,) if self.amsgrad else ()))

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate = double(rate)
        scaled, root = self.corrected(rate, double(step) + 1.0)
        gradient = penalized(gradient, parameter, self.weight_decay)
        direction, kept = self.direction(gradient, slots, root)
        return stepped(parameter, direction, scaled), kept

    def corrected(self, rate: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Emit the rate with the corrections of both moments after t steps, and the second's root; float64 scalars."""
        root = self.second_root(t)
        return rate * root / (1.0 - self.betas[0] ** t), root

    def direction(self, gradient: Tensor, slots: Mapping[Slot, Tensor], root: Tensor) -> tuple[Tensor, dict[Slot, Tensor]]:
        """Emit the uncorrected first moment over the root of the second, and the next slots."""
        first, second = self.moments(gradient, slots)
        kept = {FIRST_MOMENT: first, SECOND_MOMENT: second}
        if self.amsgrad:
            second = kept[LARGEST_SECOND_MOMENT] = second.builder.op("Max", slots[LARGEST_SECOND_MOMENT], second)
        return first / (sqrt(second) + epsilon(self.eps, first, root)), kept


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW, the mathematics of ``torch.optim.AdamW``.

    As ``Adam``, but with an unchanged gradient and separate decay of the parameter::

        p = (1 - lr * weight_decay) * p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019. The state is Adam's.

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of the weight, times lr, subtracted at every step.
        amsgrad: True to divide by the root of the largest second moment so far.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "adamw"
    weight_decay: float = 1e-2

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate = double(rate)
        scaled, root = self.corrected(rate, double(step) + 1.0)
        keep = kept_share(rate, self.weight_decay)
        direction, kept = self.direction(gradient, slots, root)
        return stepped(parameter, direction, scaled, keep), kept


adam = Adam
adamw = AdamW
