"""LARS: momentum with a rate per layer, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.optim.arithmetic import cast_like, double, known_rank, penalized, trust_ratio
from burnish.optim.base import Rate, RatedOptimizer
from burnish.optim.slots import Slot
from burnish.validation import check_not_negative

MOMENTUM = Slot("momentum")


@dataclass(frozen=True)
class LARS(RatedOptimizer):
    """Layer-wise adaptive rate scaling, the mathematics of ``optax.lars``.

    With parameter p, gradient g, momentum buffer v, and Euclidean norms over the whole parameter::

        g = g + weight_decay * p
        r = trust_coefficient * |p| / (|g| + eps)     or 1, if |p| or |g| is 0
        v = momentum * v + lr * r * g
        p = p - v                                     or, with nesterov, p - (lr * r * g + momentum * v)

    The paper divides by ``|gradient| + weight_decay * |p|``, an upper bound of ``|g|`` here. Without momentum there is no buffer.
    With ``adapt_vectors=False``, the usual practice for large batches, parameters of fewer than two dimensions (biases, scales of
    normalization) get neither the ratio nor the decay. The defaults of momentum and trust_coefficient are the paper's. Source:
    You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017. State, in the parameter's dtype and shape:
    ``momentum/<initializer>``, which includes the rate.

    Args:
        lr: learning rate, or a schedule. It multiplies the rate of each layer: with
            momentum 0, a step changes every weight by lr * trust_coefficient of its norm.
        momentum: decay factor of the buffer.
        nesterov: True to look ahead along the buffer; needs momentum.
        weight_decay: L2 penalty, added to the gradient.
        trust_coefficient: size of a layer's step, as a share of its norm.
        eps: added to the norm of the gradient.
        adapt_vectors: True to apply ratio and decay to parameters of fewer than two dimensions too.

    Raises:
        ConfigurationError: a negative or non-finite number, or nesterov without momentum.
    """

    name = "lars"
    lr: Rate = 1.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    trust_coefficient: float = 1e-3
    eps: float = 0.0
    adapt_vectors: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(
            self.name,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            trust_coefficient=self.trust_coefficient,
            eps=self.eps,
        )
        if self.nesterov and self.momentum == 0.0:
            raise ConfigurationError(f"{self.name}: nesterov needs a momentum above 0, not {self.momentum}")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (MOMENTUM,) if self.momentum else ()

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate = double(rate)
        if self.adapt_vectors or known_rank(parameter) > 1:
            gradient = penalized(gradient, parameter, self.weight_decay)
            rate = rate * trust_ratio(parameter, gradient, self.trust_coefficient, self.eps)
        change = gradient * cast_like(rate, parameter)
        if not self.momentum:
            return parameter - change, {}
        velocity = slots[MOMENTUM] * self.momentum + change
        change = change + velocity * self.momentum if self.nesterov else velocity
        return parameter - change, {MOMENTUM: velocity}


lars = LARS
