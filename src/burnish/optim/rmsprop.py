"""RMSprop: the gradient over its root mean square, optionally centered and with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import epsilon, penalized, sqrt, stepped
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.sgd import MOMENTUM
from burnish.optim.slots import Slot
from burnish.validation import check_fraction, check_not_negative

SQUARED_GRADIENT = Slot("squared_gradient")
MEAN_GRADIENT = Slot("mean_gradient")


@dataclass(frozen=True)
class RMSprop(RatedOptimizer):
    """RMSprop, the mathematics of ``torch.optim.RMSprop``.

    With parameter p, gradient g, its mean square v and, if enabled, its mean a and the momentum buffer b::

        g = g + weight_decay * p
        v = alpha * v + (1 - alpha) * g²
        a = alpha * a + (1 - alpha) * g
        d = g / (sqrt(v) + eps)             or, centered, g / (sqrt(v - a²) + eps)
        b = momentum * b + d
        p = p - lr * d                      or, with momentum, p - lr * b

    If rounding makes v - a² negative, it counts as zero. Sources: Tieleman and Hinton, "Lecture 6.5: RMSProp", Coursera, 2012;
    centered: Graves, "Generating sequences with recurrent neural networks", 2013.
    State, in the parameter's dtype and shape: ``squared_gradient/<initializer>`` and, if enabled, ``mean_gradient/<initializer>``
    and ``momentum/<initializer>`` (PyTorch's ``square_avg``, ``grad_avg``, ``momentum_buffer``).

    Args:
        lr: learning rate, or a schedule.
        alpha: decay factor of the mean square, in [0, 1).
        eps: added to the root of the mean square.
        weight_decay: L2 penalty, added to the gradient.
        momentum: decay factor of the buffer.
        centered: True to divide by the standard deviation of the gradient instead of its root mean square.

    Raises:
        ConfigurationError: a negative or non-finite number, or an alpha outside [0, 1).
    """

    name = "rmsprop"
    lr: Rate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.name, alpha=self.alpha)
        check_not_negative(self.name, eps=self.eps, weight_decay=self.weight_decay, momentum=self.momentum)

    @property
    def slots(self) -> tuple[Slot, ...]:
        mean = (MEAN_GRADIENT,) if self.centered else ()
        return (SQUARED_GRADIENT, *mean, *((MOMENTUM,) if self.momentum else ()))

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        gradient = penalized(gradient, parameter, self.weight_decay)
        variance = slots[SQUARED_GRADIENT] * self.alpha + gradient * gradient * (1.0 - self.alpha)
        kept = {SQUARED_GRADIENT: variance}
        if self.centered:
            mean = kept[MEAN_GRADIENT] = slots[MEAN_GRADIENT] * self.alpha + gradient * (1.0 - self.alpha)
            variance = gradient.builder.op("Max", variance - mean * mean, gradient.builder.scalar(0.0, parameter))
        direction = gradient / (sqrt(variance) + epsilon(self.eps, parameter))
        if self.momentum:
            direction = kept[MOMENTUM] = slots[MOMENTUM] * self.momentum + direction
        return stepped(parameter, direction, rate), kept


rmsprop = RMSprop
