"""NAdam: Adam with Nesterov momentum that grows from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Builder, Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT, MomentOptimizer
from burnish.optim.arithmetic import Tensors, cast_like, double, epsilon, kept_share, number, penalized, sqrt, stepped
from burnish.optim.base import Rate
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

MOMENTUM_PRODUCT = Slot("momentum_product", per_parameter=False)
WARM_UP_BASE = 0.96


@dataclass(frozen=True)
class NAdam(MomentOptimizer):
    """NAdam, the mathematics of ``torch.optim.NAdam``.

    With parameter p, gradient g, moments m and v, product π (1 at the start), and t = step + 1::

        g    = g + weight_decay * p                      or, decoupled, p = (1 - lr * weight_decay) * p
        μ(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2)
        π    = π * μ(t)
        m    = beta1 * m + (1 - beta1) * g
        v    = beta2 * v + (1 - beta2) * g²
        p    = p - lr * (μ(t + 1) / (1 - π * μ(t + 1)) * m + (1 - μ(t)) / (1 - π) * g) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: Dozat, "Incorporating Nesterov momentum into Adam", 2016. Computed in an equivalent form, with the factor of g as part
    of the rate and a scalar correction of v.
    State: ``first_moment/<initializer>`` and ``second_moment/<initializer>``, in the parameter's dtype and shape, and the float64
    scalar ``momentum_product`` (PyTorch's ``exp_avg``, ``exp_avg_sq``, ``mu_product``).

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient.
        momentum_decay: speed at which the momentum grows from half of ``betas[0]`` to all of it.
        decoupled_weight_decay: True to subtract ``lr * weight_decay`` of the weight instead of adding to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "nadam"
    slots = (FIRST_MOMENT, SECOND_MOMENT, MOMENTUM_PRODUCT)
    lr: Rate = 2e-3
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    needs: ClassVar = {"decoupled_weight_decay": "weight_decay"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, momentum_decay=self.momentum_decay)

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        return super().init(builder, params) | {MOMENTUM_PRODUCT: number(builder, 1.0)}

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate, t = double(rate), double(step) + 1.0
        now, following = self._momentum(t), self._momentum(t + 1.0)
        product = slots[MOMENTUM_PRODUCT] * now
        of_gradient = (1.0 - now) / (1.0 - product)
        of_moment = following / (1.0 - product * following) / of_gradient
        root = self.second_root(t)
        scaled = rate * root * of_gradient
        keep = kept_share(rate, self.weight_decay) if self.decoupled_weight_decay else None
        if not self.decoupled_weight_decay:
            gradient = penalized(gradient, parameter, self.weight_decay)
        first, second = self.moments(gradient, slots)
        ahead = gradient + first * cast_like(of_moment, parameter)
        direction = ahead / (sqrt(second) + epsilon(self.eps, parameter, root))
        kept = {MOMENTUM_PRODUCT: product, FIRST_MOMENT: first, SECOND_MOMENT: second}
        return stepped(parameter, direction, scaled, keep), kept

    def _momentum(self, t: Tensor) -> Tensor:
        """Emit μ(t), a float64 scalar."""
        return self.betas[0] * (1.0 - 0.5 * WARM_UP_BASE ** (t * self.momentum_decay))


nadam = NAdam
