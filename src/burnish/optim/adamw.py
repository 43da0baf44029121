"""AdamW: Adam whose weight decay acts on the weight, not through the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.adam import Adam
from burnish.optim.base import Rate


@dataclass(frozen=True)
class AdamW(Adam):
    """AdamW, the mathematics of ``torch.optim.AdamW``.

    As ``Adam``, but the gradient stays as it is and the parameter decays by itself::

        p = (1 - lr * weight_decay) * p - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019. The state is Adam's.
    """

    name = "adamw"
    weight_decay: float = 1e-2

    def _penalized(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        return gradient

    def _keep(self, lr: Tensor) -> Tensor | None:
        return 1.0 - lr * self.weight_decay if self.weight_decay else None


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, ...] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> AdamW:
    """Return AdamW; see ``AdamW`` for the mathematics.

    Args:
        lr: learning rate, the default of the program's input ``lr``; or a schedule.
        betas: share of the first and second moment that is kept from step to step, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of the weight, times lr, that is taken off at every step.
        amsgrad: divide by the root of the largest second moment so far.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """
    return AdamW(lr, betas, eps, weight_decay, amsgrad)
