"""RAdam: Adam that adapts the rate only after enough gradients to estimate their variance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT, MomentOptimizer
from burnish.optim.arithmetic import double, epsilon, kept_share, penalized, sqrt, stepped
from burnish.optim.slots import Slot

SHORTEST_AVERAGE = 5.0


@dataclass(frozen=True)
class RAdam(MomentOptimizer):
    """RAdam, the mathematics of ``torch.optim.RAdam``.

    With parameter p, gradient g, moments m and v, and t = step + 1::

        g = g + weight_decay * p                         or, decoupled, p = (1 - lr * weight_decay) * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        ρ∞ = 2 / (1 - beta2) - 1
        ρ  = ρ∞ - 2 * t * beta2^t / (1 - beta2^t)
        p = p - lr * m / (1 - beta1^t) * a
        a = sqrt((ρ - 4) * (ρ - 2) * ρ∞ / ((ρ∞ - 4) * (ρ∞ - 2) * ρ)) * sqrt(1 - beta2^t) / (sqrt(v) + eps)   if ρ > 5
        a = 1                                                                                                otherwise

    Source: Liu et al., "On the variance of the adaptive learning rate and beyond", 2020.
    State, in the parameter's dtype and shape: ``first_moment/<initializer>``, ``second_moment/<initializer>`` (PyTorch's
    ``exp_avg``, ``exp_avg_sq``).

    Args:
        lr: learning rate, or a schedule.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient.
        decoupled_weight_decay: True to subtract ``lr * weight_decay`` of the weight instead of adding to the gradient.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "radam"
    decoupled_weight_decay: bool = False
    needs: ClassVar = {"decoupled_weight_decay": "weight_decay"}

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate, t = double(rate), double(step) + 1.0
        scaled = rate / (1.0 - self.betas[0] ** t)
        rectified = self._rectification(t)
        if rectified is not None:
            adapts, factor = rectified
            scaled = scaled * factor
        keep = kept_share(rate, self.weight_decay) if self.decoupled_weight_decay else None
        if not self.decoupled_weight_decay:
            gradient = penalized(gradient, parameter, self.weight_decay)
        first, second = self.moments(gradient, slots)
        direction = first
        if rectified is not None:
            deviation = sqrt(second) + epsilon(self.eps, parameter)
            one = parameter.builder.scalar(1.0, parameter)
            direction = first / parameter.builder.op("Where", adapts, deviation, one)
        return stepped(parameter, direction, scaled, keep), {FIRST_MOMENT: first, SECOND_MOMENT: second}

    def _rectification(self, t: Tensor) -> tuple[Tensor, Tensor] | None:
        """Emit True if the rate adapts at step t, and the factor of the rate: bool and float64 scalars.

        None if it never adapts, because even the longest average is too short.
        """
        beta2 = self.betas[1]
        longest = 2.0 / (1.0 - beta2) - 1.0
        if longest <= SHORTEST_AVERAGE:
            return None
        builder = t.builder
        decayed = beta2**t
        left = 1.0 - decayed
        length = longest - 2.0 * t * decayed / left
        adapts = builder.op("Greater", length, SHORTEST_AVERAGE)
        share = (length - 4.0) * (length - 2.0) / length * (longest / ((longest - 4.0) * (longest - 2.0)))
        one = builder.scalar(1.0, t)
        # Select before taking the root: the number under it is negative for a shorter average.
        return adapts, sqrt(builder.op("Where", adapts, share * left, one))


radam = RAdam
