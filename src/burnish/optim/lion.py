"""Lion, which steps along the sign of a momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import double, kept_share, stepped
from burnish.optim.base import Rate, RatedOptimizer, check_betas
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

MOMENTUM = Slot("momentum")


@dataclass(frozen=True)
class Lion(RatedOptimizer):
    """Lion, the mathematics of ``optax.lion``.

    With parameter p, gradient g and momentum m::

        c = beta1 * m + (1 - beta1) * g
        p = p - lr * (sign(c) + weight_decay * p)
        m = beta2 * m + (1 - beta2) * g

    Every element moves by lr, regardless of its gradient: the paper uses an lr three to ten times smaller than AdamW's and a
    weight_decay larger by the same factor. Without a falling schedule Lion circles the minimum at a distance of about lr. Source,
    and of the defaults: Chen et al., "Symbolic discovery of optimization algorithms", 2023.
    State, in the parameter's dtype and shape: ``momentum/<initializer>``.

    Args:
        lr: learning rate, or a schedule. The length of every element's step.
        betas: share of the momentum in the direction, and its decay factor, each in [0, 1).
        weight_decay: share of the weight, times lr, subtracted at every step.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "lion"
    slots = (MOMENTUM,)
    lr: Rate = 1e-4
    betas: tuple[float, ...] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self.name, weight_decay=self.weight_decay)
        object.__setattr__(self, "betas", check_betas(self.name, self.betas))

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        beta1, beta2 = self.betas
        rate = double(rate)
        keep = kept_share(rate, self.weight_decay)
        momentum = slots[MOMENTUM]
        direction = parameter.builder.op("Sign", momentum * beta1 + gradient * (1.0 - beta1))
        following = momentum * beta2 + gradient * (1.0 - beta2)
        return stepped(parameter, direction, rate, keep), {MOMENTUM: following}


lion = Lion
