"""LAMB: Adam with a rate per layer, for large batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.adam import FIRST_MOMENT, SECOND_MOMENT, MomentOptimizer
from burnish.optim.arithmetic import cast_like, double, epsilon, known_rank, penalized, sqrt, stepped, trust_ratio
from burnish.optim.slots import Slot


@dataclass(frozen=True)
class LAMB(MomentOptimizer):
    """Layer-wise adaptive moments for batch training, the mathematics of ``optax.lamb``.

    With parameter p, gradient g, moments m and v, t = step + 1, and Euclidean norms over the whole parameter::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
        p = p - lr * (|p| / |u|) * u                  or p - lr * u, if |p| or |u| is 0

    With ``adapt_vectors=False``, the usual practice for large batches, parameters of fewer than two dimensions (biases, scales of
    normalization) get neither the ratio nor the decay. Source, and of the defaults: You et al., "Large batch optimization for
    deep learning: training BERT in 76 minutes", 2020. State, in the parameter's dtype and shape: ``first_moment/<initializer>``
    and ``second_moment/<initializer>``.

    Args:
        lr: learning rate, or a schedule. A step changes every weight by this share of
            its norm.
        betas: decay factors of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of the weight added to its update, before the ratio.
        adapt_vectors: True to apply ratio and decay to parameters of fewer than two dimensions too.

    Raises:
        ConfigurationError: a negative or non-finite number, or a beta outside [0, 1).
    """

    name = "lamb"
    eps: float = 1e-6
    weight_decay: float = 1e-2
    adapt_vectors: bool = True

    def update(
        self, parameter: Tensor, gradient: Tensor, slots: Mapping[Slot, Tensor], *, step: Tensor, rate: Tensor
    ) -> tuple[Tensor, dict[Slot, Tensor]]:
        rate, t = double(rate), double(step) + 1.0
        # u = m * correction / (sqrt(v) + eps * root), with both corrections as scalars
        root = self.second_root(t)
        correction = root / (1.0 - self.betas[0] ** t)
        first, second = self.moments(gradient, slots)
        direction = first * cast_like(correction, parameter) / (sqrt(second) + epsilon(self.eps, parameter, root))
        if self.adapt_vectors or known_rank(parameter) > 1:
            direction = penalized(direction, parameter, self.weight_decay)
            rate = rate * trust_ratio(parameter, direction)
        return stepped(parameter, direction, rate), {FIRST_MOMENT: first, SECOND_MOMENT: second}


lamb = LAMB
